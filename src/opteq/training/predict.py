"""Predictions for a folder of images, with what is known about each solve."""

import csv
import io
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opteq.data.folder import find_images
from opteq.data.images import FileImages
from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError
from opteq.files import write_file
from opteq.layer import SolveCounts, SolveLog, solve_log
from opteq.models.loading import ModelCard
from opteq.results import SolveInfo

BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        path: The image file.
        label: Name of the most probable class.
        confidence: Its probability.
        converged: Whether every equilibrium layer reached its tolerance.
        residual: Largest relative residual over the equilibrium layers.
    """

    path: Path
    label: str
    confidence: float
    converged: bool
    residual: float


@torch.no_grad()
def predict_folder(network: nn.Module, card: ModelCard, folder: Path) -> list[Prediction]:
    """Classify every image in a folder and the folders inside it, in the order of their paths.

    Raises:
        ConfigError: The network does not classify whole images, the folder is missing or empty, or an image
            cannot be read.
    """
    if not isinstance(card.image_size, int) or card.task != "classification":
        raise ConfigError(
            "Predictions are classes of whole images, but this network classifies pixels; load it with "
            "opteq.load(RUN) and call it on a batch of images."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()
    paths = find_images(folder)
    images = FileImages(paths, torch.zeros(len(paths), dtype=torch.long), card.in_channels, card.image_size)
    preprocess = Preprocess(Normalization(card.mean, card.std))
    loader: DataLoader[Any] = DataLoader(images, BATCH_SIZE, collate_fn=preprocess)
    predictions: list[Prediction] = []
    for batch, _ in loader:
        ends = _Ends()
        with solve_log(network, SolveLog(forward=ends)):
            logits = network(batch.to(device))
        confidences, labels = logits.softmax(1).max(1)
        converged, residuals = ends.per_image(len(batch))
        rows = zip(labels.tolist(), confidences.tolist(), converged.tolist(), residuals.tolist(), strict=True)
        for label, *numbers in rows:
            predictions.append(Prediction(paths[len(predictions)], card.class_names[label], *numbers))
    return predictions


def write_predictions(path: Path, predictions: list[Prediction]) -> None:
    """Write predictions as a CSV file with one column per field."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(field.name for field in fields(Prediction))
    writer.writerows(astuple(prediction) for prediction in predictions)
    write_file(path, text.getvalue().encode())


class _Ends(SolveCounts):
    """How the solves of a batch ended, image by image."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[SolveInfo] = []

    def add(self, info: SolveInfo) -> None:
        self.infos.append(info)

    def per_image(self, batch: int) -> tuple[Tensor, Tensor]:
        """Whether all layers converged, and their largest residual, each of shape (batch,)."""
        if not self.infos:
            return torch.ones(batch, dtype=torch.bool), torch.zeros(batch)
        converged = torch.stack([info.converged for info in self.infos])
        return converged.all(0), torch.stack([info.residual for info in self.infos]).amax(0)
