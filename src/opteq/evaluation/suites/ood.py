"""The suite `ood`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from opteq.data.base import ImageDataModule
from opteq.data.finding import find_images
from opteq.data.images import FileImages
from opteq.data.preprocess import Preprocess
from opteq.errors import ConfigError
from opteq.evaluation.ood import OodScores, fit_temperature, ood_scores
from opteq.evaluation.suites.case import Batches, Case, Outcome
from opteq.evaluation.table import Table
from opteq.plots.unknown import draw_confidences

_BATCH = 64


def ood(case: Case) -> Outcome:
    """Scores on images of unknown classes beside those of known ones."""
    # Looked for first: where there are none a pass over the known ones would be in vain.
    others = _unknown(case)
    loader = case.data.test_dataloader()
    known, labels = case.logits(loader)
    unknown, _ = case.logits(others)
    temperatures = [1.0]
    case.data.data.setup("validate")
    if case.data.has_validation:
        temperatures.append(fit_temperature(*case.logits(case.data.val_dataloader())))
    found = [ood_scores(known, labels, unknown, temperature) for temperature in temperatures]
    kinds = ("raw", "scaled")[: len(found)]
    rows = [
        [name, *(f"{getattr(part, key):.4g}" for part in found)]
        for key, name in (
            ("temperature", "temperature"),
            ("accuracy", "accuracy on known classes"),
            ("known_kl", "KL(one-hot ‖ prediction) on them"),
            ("ece", "calibration error on them"),
            ("unknown_kl", "KL(prediction ‖ uniform) on unknown classes"),
            ("auroc", "AUROC of the confidence"),
        )
    ]
    title = f"{case.images(loader)} of known classes, {case.images(others)} of unknown"
    table = Table(title, ["", *kinds], rows)
    return Outcome(
        {kind: _numbers(part) for kind, part in zip(kinds, found, strict=True)},
        [table],
        {"": draw_confidences(found)},
    )


def _numbers(scores: OodScores) -> dict[str, float]:
    return {key: value for key, value in asdict(scores).items() if isinstance(value, float)}


def _unknown(case: Case) -> Batches:
    """Batches of images of unknown classes."""
    folder, data = case.options.unknown, case.data
    if folder is None:
        if isinstance(data.data, ImageDataModule) and len(data.data.kept_classes) < len(
            data.data.all_classes
        ):
            return data.data.unseen_dataloader()
        raise ConfigError(
            "The suite ood takes images of unknown classes: name a folder of them with --unknown, or train"
            " with some classes left out of --data.classes."
        )
    size = data.image_size
    if not isinstance(size, int):
        raise ConfigError(f"Images of a folder become squares, but those of {data.title} are none.")
    paths = find_images(Path(folder))
    images = FileImages(paths, torch.zeros(len(paths), dtype=torch.long), data.in_channels, size)
    return DataLoader(images, batch_size=_BATCH, collate_fn=Preprocess(data.normalization))
