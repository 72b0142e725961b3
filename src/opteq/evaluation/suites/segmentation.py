"""The suite `segmentation`."""

from __future__ import annotations

import numpy as np

from opteq.evaluation.passes import device_of
from opteq.evaluation.scenerecord import evaluate_scenes
from opteq.evaluation.suites.case import Case, Outcome
from opteq.evaluation.table import Table
from opteq.plots.masks import draw_class_scores


def segmentation(case: Case) -> Outcome:
    """How well the pixels of each class are found."""
    names = case.data.class_names
    loader, device = case.data.test_dataloader(), device_of(case.network)
    batches = case.parts.follow(case.chosen(loader))
    record = evaluate_scenes(case.network, batches, names, case.data.normalization, device)
    iou, found = record.intersection_over_union, record.class_accuracy
    means = {"mIoU": float(np.nanmean(iou)), "mAcc": float(np.nanmean(found)), "aAcc": record.pixel_accuracy}
    rows = [
        [name, f"{count:,}", *("-" if np.isnan(v) else f"{v:.2%}" for v in values)]
        for name, count, *values in zip(names, record.confusion.sum(1), iou, found, strict=True)
    ]
    rows.append(["mean", f"{record.confusion.sum():,}", f"{means['mIoU']:.2%}", f"{means['mAcc']:.2%}"])
    table = Table(
        f"Classes of pixels of {case.images(loader)}; {means['aAcc']:.2%} of all pixels are right",
        ["class", "pixels", "IoU", "found"],
        rows,
    )
    by_class = {"intersection_over_union": dict(zip(names, iou, strict=True))}
    by_class["accuracy"] = dict(zip(names, found, strict=True))
    return Outcome(means | by_class, [table], {"": draw_class_scores(iou, found, names)})
