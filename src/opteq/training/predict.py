"""Predictions for a folder of images, with what is known about each solve."""

import csv
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opteq.data.folder import find_images
from opteq.data.images import FileImages
from opteq.data.preprocess import Normalization, Preprocess
from opteq.layer import EquilibriumLayer
from opteq.models.loading import ModelCard

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
        ConfigError: The folder is missing or empty, or an image cannot be read.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()
    paths = find_images(folder)
    images = FileImages(paths, torch.zeros(len(paths), dtype=torch.long), card.in_channels, card.image_size)
    preprocess = Preprocess(Normalization(card.mean, card.std))
    loader: DataLoader[Any] = DataLoader(images, BATCH_SIZE, collate_fn=preprocess)
    predictions: list[Prediction] = []
    for batch, _ in loader:
        with _SolveRecorder(network) as solves:
            logits = network(batch.to(device))
        confidences, labels = logits.softmax(1).max(1)
        converged, residuals = solves.per_image(len(batch))
        rows = zip(labels.tolist(), confidences.tolist(), converged.tolist(), residuals.tolist(), strict=True)
        for label, *numbers in rows:
            predictions.append(Prediction(paths[len(predictions)], card.class_names[label], *numbers))
    return predictions


def write_predictions(path: Path, predictions: list[Prediction]) -> None:
    """Write predictions as a CSV file with one column per field."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Prediction))
        writer.writerows(astuple(prediction) for prediction in predictions)


class _SolveRecorder(ExitStack):
    """Records, image by image, how the solves of the equilibrium layers in a network end."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._converged: list[Tensor] = []
        self._residuals: list[Tensor] = []
        for layer in network.modules():
            if isinstance(layer, EquilibriumLayer):
                self.callback(layer.register_forward_pre_hook(self._record).remove)

    def per_image(self, batch: int) -> tuple[Tensor, Tensor]:
        """Whether all layers converged, and their largest residual, each of shape (batch,)."""
        if not self._converged:
            return torch.ones(batch, dtype=torch.bool), torch.zeros(batch)
        return torch.stack(self._converged).all(0), torch.stack(self._residuals).amax(0)

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, EquilibriumLayer)
        info = layer.solve(*inputs).info
        self._converged.append(info.converged)
        self._residuals.append(info.residual)
