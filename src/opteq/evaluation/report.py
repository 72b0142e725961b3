"""The report of a run: one page that shows what the network does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from opteq import __version__
from opteq.data.facts import Facts
from opteq.evaluation.branchstudy import BranchRecord
from opteq.evaluation.equilibriumreport import JSON, as_json, worth
from opteq.evaluation.equilibriumstudy import study_equilibrium
from opteq.evaluation.page import image, page, section, side_by_side, table
from opteq.evaluation.record import TestRecord, evaluate
from opteq.evaluation.scenerecord import SegmentationRecord, evaluate_scenes
from opteq.evaluation.scores import accuracy_interval, class_scores
from opteq.evaluation.sections import configuration, equilibria, headline, origin, read_summary, training
from opteq.plots.calibration import draw_calibration
from opteq.plots.confusion import draw_confusion
from opteq.plots.masks import draw_class_scores, draw_scenes
from opteq.plots.overview import draw_overview
from opteq.plots.relations import draw_correlation, draw_perturbations, draw_relations
from opteq.plots.samples import draw_samples
from opteq.system.files import write_beside, write_file, write_json
from opteq.system.progress import follow

# Images that equilibria are studied on for the report; `opteq test RUN --suite equilibrium` takes all.
_STUDIED = 1000
# Half the width of an interval that a reader need not be told of.
_SURE = 0.01


def write_report(run_dir: Path, network: nn.Module, data: Facts) -> Path:
    """Evaluate `network` on the test set and write what it does into the run's folder.

    Writes `record.npz` (what the pictures of the test set show), `report.html` (one self-contained page) and,
    for networks with an equilibrium layer, `equilibrium.png` (one compact picture) and `equilibrium.json`
    (what equilibria are worth). The page takes its headline numbers from `summary.json` and its training
    curves from `metrics.csv`; where one of these is missing, it says so.

    Args:
        run_dir: folder of the run.
        network: maps images to logits; evaluated where its parameters are.
        data: the data, set up for the test stage.

    Returns:
        The path of `report.html`.

    Raises:
        ConfigError: if `summary.json` or `metrics.csv` cannot be read, or the test set is empty.
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    # Read first: a file that cannot be read should not cost a pass over the test set.
    summary = read_summary(run_dir / "summary.json")
    curves = training(run_dir / "metrics.csv")
    loader = data.test_dataloader()
    test_set = (follow(loader, "Report, predictions"), data.class_names, data.normalization)
    notes = {}
    if data.task == "segmentation":
        record = evaluate_scenes(network, *test_set, device)
        scores, results = _scene_scores(record), [_scenes(record)]
    else:
        record = evaluate(network, *test_set, device)
        scores, results = _scores(record), [_branches(record.branches), _predictions(record)]
        notes["test_accuracy"] = _sureness(record)
    record.save(run_dir / "record.npz")
    studied = ""
    if len(record.traces.images):
        study = study_equilibrium(network, follow(loader, "Report, equilibria"), device, _share(loader))
        write_json(run_dir / JSON, as_json(study))
        studied = worth(study)
        with write_beside(run_dir / "equilibrium.png") as file:
            draw_overview(record.traces).savefig(file, format="png", dpi=150)

    parts = [
        headline(summary, scores, record, notes),
        curves,
        equilibria(record.traces),
        studied,
        *results,
        origin(run_dir / "versions.json"),
        configuration(run_dir / "config.yaml"),
    ]
    known = [str(summary[key]) for key in ("model", "dataset") if key in summary]
    subtitle = " on ".join(known) or "Report of a training run"
    footer = f"Written by opteq {__version__} from record.npz, metrics.csv and summary.json."
    path = run_dir / "report.html"
    write_file(path, page(run_dir.resolve().name, subtitle, parts, footer).encode())
    return path


def _share(loader: Any) -> float:
    """The share of the images that a report has the time for, all where their number is not known."""
    try:
        return min(1.0, _STUDIED / len(loader.dataset))
    except (AttributeError, TypeError, ZeroDivisionError):
        return 1.0


def _scores(record: TestRecord) -> dict[str, float]:
    top5 = {"accuracy_top5": record.accuracy(top=5)} if len(record.class_names) > 5 else {}
    return {"test_accuracy": record.accuracy(), "calibration_error": record.reliability.error} | top5


def _sureness(record: TestRecord) -> str:
    """Of how many images the accuracy is and, where they are few, the range that they leave open."""
    images, right = len(record.labels), int((record.ranks == 0).sum())
    low, high = accuracy_interval(right, images)
    said = f"of {images:,} test image{'s' * (images > 1)}"
    return f"{said}; 95 % interval {low:.1%} to {high:.1%}" if (high - low) / 2 > _SURE else said


def _scene_scores(record: SegmentationRecord) -> dict[str, float]:
    return {
        "test_mIoU": float(np.nanmean(record.intersection_over_union)),
        "test_mAcc": float(np.nanmean(record.class_accuracy)),
        "test_aAcc": record.pixel_accuracy,
    }


def _scenes(record: SegmentationRecord) -> str:
    explanation = f"{record.pixel_accuracy:.1%} of the pixels are classified rightly."
    return section(
        "Predictions",
        explanation,
        image(
            draw_scenes(record.scenes, record.class_names),
            "Test images drawn at random, the classes of their pixels (white: none), and the predictions.",
        ),
        image(
            draw_class_scores(record.intersection_over_union, record.class_accuracy, record.class_names),
            "Intersection over union of each class, and the share of its pixels that were found.",
        ),
    )


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
    both = side_by_side(confusion, calibration)
    return section("Predictions", explanation, side_by_side(*parts), _class_table(record), both)


def _class_table(record: TestRecord) -> str:
    """How well each class is found, those that are found worst first."""
    scores = class_scores(record.confusion)
    order = np.argsort(np.nan_to_num(scores.f1, nan=np.inf), kind="stable")
    columns = (scores.recall, scores.precision, scores.f1)
    rows = [
        [
            record.class_names[c],
            f"{scores.counts[c]:,}",
            *("–" if np.isnan(column[c]) else f"{column[c]:.1%}" for column in columns),
        ]
        for c in order
    ]
    header = ["class", "images", "recall", "precision", "F1"]
    return table("Scores of each class, the lowest first", header, rows)
