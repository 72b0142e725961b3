"""Predictions for image files, with what is known about each solve."""

import csv
import io
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from opteq.data.folder import find_images
from opteq.data.images import read_image
from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError
from opteq.layer import SolveCounts, SolveLog, solve_log
from opteq.models.loading import ModelCard
from opteq.results import SolveInfo
from opteq.system.files import write_file

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


def predict_to_file(network: nn.Module, card: ModelCard, images: Path, output: Path) -> str:
    """Classify an image, or those in a folder that can be read, into a CSV file.

    Returns:
        What to tell the user, with a line for each image that was skipped.

    Raises:
        ConfigError: As for `predict_images`, or there is no place for the file.
    """
    # Looked at first: a wrong name should not cost a pass over the images.
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; give --output the name of a file.")
    if not output.parent.is_dir():
        raise ConfigError(f"The folder {output.parent} does not exist; create it or choose another --output.")
    skipped: list[str] = []
    predictions = predict_images(network, card, images, skipped.append)
    write_predictions(output, predictions)
    count = "1 prediction" if len(predictions) == 1 else f"{len(predictions)} predictions"
    lines = [f"Wrote {count} to {output}.", *(f"Skipped: {text}" for text in skipped)]
    return "\n".join(lines)


@torch.no_grad()
def predict_images(
    network: nn.Module,
    card: ModelCard,
    images: str | Path,
    skip: Callable[[str], None] = warnings.warn,
) -> list[Prediction]:
    """Classify one image, or every image in a folder and the folders inside it, in the order of their paths.

    Args:
        network: The network.
        card: What it takes and what its logits stand for.
        images: An image file or a folder.
        skip: Receives the reason, which names the file, for each that cannot be read; a warning unless given.

    Raises:
        ConfigError: The network does not classify whole images, the folder is missing or empty, or no image
            in it can be read.
    """
    if not isinstance(card.image_size, int) or card.task != "classification":
        raise ConfigError(
            "Predictions are classes of whole images, but this network classifies pixels; load it with "
            "opteq.load(RUN) and call it on a batch of images."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()
    preprocess = Preprocess(Normalization(card.mean, card.std))
    predictions: list[Prediction] = []
    files = [Path(images)] if Path(images).is_file() else find_images(Path(images))
    for start in range(0, len(files), BATCH_SIZE):
        pixels: dict[Path, Tensor] = {}
        for path in files[start : start + BATCH_SIZE]:
            try:
                pixels[path] = read_image(path, card.in_channels, card.image_size)
            except ConfigError as error:
                skip(str(error))
        if not pixels:
            continue
        batch, _ = preprocess(
            (torch.stack(list(pixels.values())), torch.zeros(len(pixels), dtype=torch.long))
        )
        ends = _Ends()
        with solve_log(network, SolveLog(forward=ends)):
            logits = network(batch.to(device))
        confidences, labels = logits.softmax(1).max(1)
        converged, residuals = ends.per_image(len(batch))
        rows = zip(labels.tolist(), confidences.tolist(), converged.tolist(), residuals.tolist(), strict=True)
        for path, (label, *numbers) in zip(pixels, rows, strict=True):
            predictions.append(Prediction(path, card.class_names[label], *numbers))
    if not predictions:
        raise ConfigError(f"None of the {len(files)} images in {images} could be read.")
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
