"""The sections that the reports of all runs have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from opteq.errors import ConfigError
from opteq.evaluation.metrics import read_curves
from opteq.evaluation.page import facts, folded, image, missing, section, side_by_side, tiles
from opteq.evaluation.passes import EvaluationRecord
from opteq.evaluation.trace import Traces
from opteq.plots.convergence import draw_objective, draw_residual
from opteq.plots.equilibria import draw_equilibria
from opteq.plots.patchweights import draw_attention
from opteq.plots.training import Curve, draw_curves, is_share, spoken
from opteq.results import residual_text
from opteq.system.files import read_json

# So many equilibria fit a phone beside one another.
_ABREAST = 3


def read_summary(path: Path) -> dict[str, Any]:
    """The run's summary, empty if there is none."""
    return read_json(path) if path.exists() else {}


# Name and format of the headline numbers, by their key in the summary.
_TILES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "test_accuracy": ("Test accuracy", lambda v: f"{v:.2%}"),
    "test_mIoU": ("Test mIoU", lambda v: f"{v:.2%}"),
    "test_mAcc": ("Test mAcc", lambda v: f"{v:.2%}"),
    "test_aAcc": ("Test aAcc", lambda v: f"{v:.2%}"),
    "parameters": ("Parameters", lambda v: f"{v:,}"),
    "solver_steps_mean": ("Solver steps, mean", lambda v: f"{v:.1f}"),
    "residual_max": ("Residual, largest", residual_text),
    "unconverged": ("Unconverged solves", lambda v: f"{v:,}"),
    "seconds_train": ("Training time", lambda v: _duration(v)),
    "images_per_second": ("Training speed", lambda v: f"{v:,.0f} images/s"),
    "peak_memory_mb": ("Peak memory", lambda v: f"{v:,.0f} MB"),
    "accuracy_top5": ("Top-5 accuracy", lambda v: f"{v:.2%}"),
    "calibration_error": ("Calibration error", lambda v: f"{v:.2%}"),
}


def headline(
    summary: Mapping[str, Any],
    scores: Mapping[str, float],
    record: EvaluationRecord,
    notes: Mapping[str, str] = {},
) -> str:
    """The numbers of the summary, those of the record that the summary lacks, and notes on some of them."""
    known: dict[str, Any] = dict(scores)
    if record.solves:
        known |= {
            name: getattr(record, name) for name in ("solver_steps_mean", "residual_max", "unconverged")
        }
    known |= {key: value for key, value in summary.items() if value is not None}
    numbers = []
    for key, (name, show) in _TILES.items():
        if key in known:
            try:
                numbers.append((name, show(known[key]), notes.get(key, "")))
            except (TypeError, ValueError):
                raise ConfigError(
                    f"Expected `{key}` in summary.json to be a number, got {known[key]!r}."
                ) from None
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


def training(path: Path) -> str:
    """The training curves in a `metrics.csv`."""
    heading, explanation = (
        "Training",
        "Each point stands for one epoch, for its mean unless it says otherwise.",
    )
    if not path.exists():
        return section(heading, "", missing("metrics.csv is missing: there are no curves to draw."))
    panels = read_curves(path)
    if not panels:
        return section(heading, "", missing("metrics.csv holds no training curves yet."))
    flat = {
        quantity: value for quantity, curves in panels.items() if (value := _constant(curves)) is not None
    }
    pictures = [
        image(draw_curves(quantity, curves), f"{_meaning(quantity)}, epoch by epoch.")
        for quantity, curves in panels.items()
        if quantity not in flat
    ]
    sentences = [
        f"{spoken(quantity).capitalize()}: {f'{value:.2%}' if is_share(quantity) else f'{value:g}'}"
        " throughout."
        for quantity, value in flat.items()
    ]
    return section(heading, " ".join([explanation, *sentences]), side_by_side(*pictures))


def _constant(curves: Mapping[str, Curve]) -> float | None:
    """The one value that all curves of a quantity have, if it is one."""
    values = {float(value) for _, points in curves.values() for value in points}
    return values.pop() if len(values) == 1 else None


# What a name does not say of itself.
_MEANINGS = {
    "residual_max": "Largest relative residual ‖T(z) - z‖ / ‖T(z)‖, without unit, that a solve ended with",
    "solver_steps": "Solver steps, the evaluations of the map that an image takes",
    "unconverged": "Unconverged solves, the number of images that missed the tolerance",
}


def _meaning(quantity: str) -> str:
    return _MEANINGS.get(quantity, spoken(quantity).capitalize())


def equilibria(traces: Traces) -> str:
    """How the first equilibrium layer reaches its equilibria, and what these look like."""
    heading = "Equilibria"
    if not len(traces.images):
        return section(heading, "", missing("This network has no equilibrium layer to look into."))
    explanation = "The first equilibrium layer answers with a point z* that its map T leaves unchanged"
    explanation += _what_equilibria_are(traces)
    along = (
        "Along a plain iteration z ← T(z), in float64, for a few test images (thin lines)"
        " and their median: how far z still is from a fixed point. A thin line ends where only rounding is"
        " left, the median where half of them have ended."
    )
    if not traces.energy.size:
        along += " This map has no hidden objective."
    read = "their equilibria"
    if traces.symbol == "y":
        read = "the hidden variable y of their equilibria, which is what the network reads"
    pictures = (
        f"Test images and {read}, largest values brightest. The channels are those that"
        " vary most; each row has one colour scale."
    )
    if np.isfinite(traces.distance).any():
        pictures += (
            f" Above each {traces.symbol}* stands how far from the true one it is at most, as a Euclidean"
            " norm, certified."
        )
    curves = [image(draw_residual(traces.residual, float(traces.tolerance)), along)]
    if traces.energy.size:
        curves.append(
            image(draw_objective(traces.energy), "How far φ lies above its lowest value, likewise.")
        )
    places = range(len(traces.images))
    columns = [draw_equilibria(traces, places[at : at + _ABREAST]) for at in places[::_ABREAST]]
    parts = [image(columns, pictures), side_by_side(*curves)]
    if traces.attention.shape[1]:
        weights = (
            "What each patch of the features weighs in the equilibrium, averaged over the groups of"
            " channels: 1 where the state reproduces it, near 0 where it is left out."
        )
        parts.append(image(draw_attention(traces), weights))
    return section(heading, explanation, *parts)


def _what_equilibria_are(traces: Traces) -> str:
    """How the sentence about equilibria goes on: what they are for the hidden objective."""
    if not traces.energy.size:
        return "."
    objective = "the hidden objective φ that the layer's weights and the image define"
    total, certified = len(traces.minimiser), int(traces.minimiser.sum())
    if total and certified == total:
        return f": the minimum of {objective}, certified for each of the images below."
    stationary = f", where {objective} is stationary."
    if not total:
        return stationary
    local = int(traces.local_minimiser.sum()) - certified
    return (
        f"{stationary} Of the {total} images below it is certified to be the minimum of φ for {certified},"
        f" by an estimate a local minimum for {local}, and not known to be one for"
        f" {total - certified - local}."
    )


# Names of what `versions.json` says, in the order of the table; other packages follow by name.
_ORIGIN = {
    "command": "command",
    "date": "date",
    "processor": "processor",
    "cores": "cores",
    "accelerator": "accelerator",
    "platform": "system",
    "python": "Python",
}


def origin(path: Path) -> str:
    """What command made the run, when, on what hardware and with which versions, if the run says so."""
    if not path.exists():
        return ""
    known = read_json(path)
    names = [name for name in _ORIGIN if name in known] + [name for name in known if name not in _ORIGIN]
    return section(
        "How it was made", "", facts((_ORIGIN.get(name, name), str(known[name])) for name in names)
    )


def configuration(path: Path) -> str:
    """The resolved configuration, folded away, if the run has one."""
    return folded("Configuration", path.read_text(encoding="utf-8")) if path.exists() else ""
