"""The report of a run: one page that shows what the network does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opteq import __version__
from opteq.errors import ConfigError
from opteq.evaluation.branches import BranchRecord
from opteq.evaluation.images import Normalization
from opteq.evaluation.metrics import read_curves
from opteq.evaluation.page import folded, image, missing, page, section, side_by_side, tiles
from opteq.evaluation.record import TestRecord, evaluate
from opteq.files import write_beside
from opteq.plots.attention import draw_attention
from opteq.plots.branches import draw_correlation, draw_perturbations, draw_relations
from opteq.plots.calibration import draw_calibration
from opteq.plots.confusion import draw_confusion
from opteq.plots.convergence import draw_convergence
from opteq.plots.equilibria import draw_equilibria
from opteq.plots.overview import draw_overview
from opteq.plots.samples import draw_samples
from opteq.plots.training import draw_training


class EvaluationData(Protocol):
    """What the report needs of a data module: its test set, ready to load."""

    @property
    def class_names(self) -> Sequence[str]: ...

    @property
    def normalization(self) -> Normalization: ...

    def test_dataloader(self) -> Iterable[Sequence[Tensor]]: ...


def write_report(run_dir: Path, network: nn.Module, datamodule: EvaluationData) -> Path:
    """Evaluate `network` on the test set and write what it does into the run's folder.

    Writes `record.npz` (all that the figures show), `report.html` (one self-contained page) and,
    for networks with an equilibrium layer, `equilibrium.png` (one compact picture). The page takes
    its headline numbers from `summary.json` and its training curves from `metrics.csv`; where one
    of these is missing, it says so.

    Args:
        run_dir: folder of the run.
        network: maps images to logits; evaluated where its parameters are.
        datamodule: set up for its test stage.

    Returns:
        The path of `report.html`.

    Raises:
        ConfigError: if `summary.json` or `metrics.csv` cannot be read, or the test set is empty.
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    # Read first: a file that cannot be read should not cost a pass over the test set.
    summary = _read_summary(run_dir / "summary.json")
    training = _training(run_dir / "metrics.csv")
    record = evaluate(
        network,
        datamodule.test_dataloader(),
        datamodule.class_names,
        datamodule.normalization,
        device,
    )
    record.save(run_dir / "record.npz")
    if len(record.traces.images):
        with write_beside(run_dir / "equilibrium.png") as file:
            draw_overview(record).savefig(file, format="png", dpi=150)

    parts = [
        _headline(summary, record),
        training,
        _equilibria(record),
        _branches(record.branches),
        _predictions(record),
        _configuration(run_dir / "config.yaml"),
    ]
    known = [str(summary[key]) for key in ("model", "dataset") if key in summary]
    subtitle = " on ".join(known) or "Report of a training run"
    footer = f"Written by opteq {__version__} from record.npz, metrics.csv and summary.json."
    path = run_dir / "report.html"
    with write_beside(path) as file:
        file.write(page(run_dir.resolve().name, subtitle, parts, footer).encode())
    return path


def _read_summary(path: Path) -> dict[str, Any]:
    """The run's summary, empty if there is none."""
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(summary, dict):
        raise ConfigError(f"Expected {path} to hold one JSON object, got {type(summary).__name__}.")
    return summary


# Name and format of the headline numbers, by their key in the summary.
_TILES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "test_accuracy": ("Test accuracy", lambda v: f"{v:.2%}"),
    "parameters": ("Parameters", lambda v: f"{v:,}"),
    "solver_steps_mean": ("Solver steps, mean", lambda v: f"{v:.1f}"),
    "residual_max": ("Residual, largest", lambda v: f"{v:.1e}"),
    "unconverged": ("Unconverged solves", lambda v: f"{v:,}"),
    "seconds_train": ("Training time", lambda v: _duration(v)),
    "images_per_second": ("Training speed", lambda v: f"{v:,.0f} images/s"),
    "peak_memory_mb": ("Peak memory", lambda v: f"{v:,.0f} MB"),
}


def _headline(summary: dict[str, Any], record: TestRecord) -> str:
    """The numbers of the summary, and those of the record that the summary lacks."""
    known: dict[str, Any] = {"test_accuracy": record.accuracy()}
    if record.solves:
        known |= {
            "solver_steps_mean": record.solver_steps_mean,
            "residual_max": record.residual_max,
            "unconverged": record.unconverged,
        }
    known |= {key: value for key, value in summary.items() if value is not None}
    numbers = []
    for key, (name, show) in _TILES.items():
        if key in known:
            try:
                numbers.append((name, show(known[key])))
            except (TypeError, ValueError):
                raise ConfigError(
                    f"Expected `{key}` in summary.json to be a number, got {known[key]!r}."
                ) from None
    if len(record.class_names) > 5:
        numbers.append(("Top-5 accuracy", f"{record.accuracy(top=5):.2%}"))
    numbers.append(("Calibration error", f"{record.reliability.error:.2%}"))
    html = tiles(numbers)
    if not summary:
        html += missing("summary.json is missing: parameters, times and memory are not known.")
    return html


def _duration(seconds: float) -> str:
    """Seconds as a reader says them: `41 s`, `12 min 05 s`, `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _training(path: Path) -> str:
    heading, explanation = "Training", "Each point is the mean over one epoch."
    if not path.exists():
        return section(heading, "", missing("metrics.csv is missing: there are no curves to draw."))
    panels = read_curves(path)
    if not panels:
        return section(heading, "", missing("metrics.csv holds no training curves yet."))
    return section(
        heading,
        explanation,
        image(draw_training(panels), "Loss, accuracy, and how the solves went, epoch by epoch."),
    )


def _equilibria(record: TestRecord) -> str:
    heading, traces = "Equilibria", record.traces
    if not len(traces.images):
        return section(heading, "", missing("This network has no equilibrium layer to look into."))
    explanation = (
        "The first equilibrium layer answers with a point z* that its map T leaves unchanged:"
        " the minimum of the hidden objective φ that the layer's weights and the image define."
    )
    along = (
        "Along a plain iteration z ← T(z), in float64, for a few test images (thin lines)"
        " and their median: how far z still is from a fixed point"
    )
    along += (
        ", and how far φ lies above its lowest value."
        if traces.energy.size
        else ". This map has no hidden objective."
    )
    pictures = (
        "Test images and their equilibria, largest values brightest. The channels are those that"
        " vary most; each row has one colour scale."
    )
    parts = [
        image(draw_equilibria(traces), pictures),
        image(draw_convergence(traces.residual, traces.energy), along),
    ]
    if traces.attention.shape[1]:
        weights = (
            "What each patch of the features weighs in the equilibrium, averaged over the groups of"
            " channels: 1 where the state reproduces it, near 0 where it is left out."
        )
        parts.append(image(draw_attention(traces), weights))
    return section(heading, explanation, *parts)


def _branches(record: BranchRecord) -> str:
    """How several branches relate; nothing for a network that has none."""
    if not record.sizes.size:
        return ""
    parts = []
    if record.heritage.size:
        relations = (
            f"Inner products of neighbouring branches, per pair of channels, for {len(record.heritage)} test"
            " images: heritage H between corresponding channels, diversity D between the others (magnitudes)."
        )
        correlation = (
            "Correlations of the channels of the first two branches for one image. Over"
            f" {len(record.heritage)} images the diagonal holds {record.diagonal_share.mean():.1%} of their"
            f" magnitude; {1 / len(record.correlation):.1%} would be chance."
        )
        parts.append(image(draw_relations(record), relations))
        parts.append(image(draw_correlation(record), correlation))
    perturbations = (
        "Accuracy when the features g(x) are moved by ε in the direction that raises the hidden objective"
        " most (reconstructed), or in random directions: mean and range of five trials."
    )
    parts.append(image(draw_perturbations(record), perturbations))
    return section("Branches", "Each branch is an equilibrium at its own resolution.", side_by_side(*parts))


def _predictions(record: TestRecord) -> str:
    right = len(record.labels[record.ranks == 0])
    explanation = f"{right:,} of {len(record.labels):,} test images are classified rightly."
    parts = [
        image(draw_samples(samples, record.class_names), caption)
        for samples, caption in (
            (record.right, "Right predictions, drawn at random, with their confidence."),
            (record.mistakes, "The most confident mistakes."),
        )
        if len(samples.images)
    ]
    confusion = image(
        draw_confusion(record.confusion, record.class_names),
        "Confusion matrix: how many images of a class were taken for which.",
    )
    calibration = image(
        draw_calibration(record.reliability),
        f"Calibration: bars below the diagonal are overconfident."
        f" Expected calibration error {record.reliability.error:.2%}.",
    )
    return section("Predictions", explanation, *parts, side_by_side(confusion, calibration))


def _configuration(path: Path) -> str:
    """The resolved configuration, folded away, if the run has one."""
    return folded("Configuration", path.read_text(encoding="utf-8")) if path.exists() else ""
