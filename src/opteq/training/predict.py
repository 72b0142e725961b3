"""Predictions for image files, with what is known about each solve."""

import csv
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from opteq.data.finding import find_images
from opteq.data.images import read_image
from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError, OpteqError
from opteq.layer import solve_log
from opteq.models.loading import ModelCard
from opteq.results import SolveInfo
from opteq.solvelog import SolveCounts, SolveLog
from opteq.system.files import readable, write_beside
from opteq.system.progress import follow

BATCH_SIZE = 64
TOLD = 10
"""So many predictions are told to the user as well."""


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
    """Classify an image, or those in a folder that can be read, into a CSV file with one column per field.

    What there is of it is kept if the predictions end early, by an error or an interrupt.

    Args:
        network: The network.
        card: What it takes and what its logits stand for.
        images: An image file or a folder.
        output: The file, which must not be there yet.

    Returns:
        What to tell the user, with a line for each of at most ten images and for all that was skipped.

    Raises:
        ConfigError: As for `predict_images`, or there is no place for the file.
        KeyboardInterrupt: The predictions were interrupted; the message says what there is of them.
    """
    # Looked at first: a wrong name should not cost a pass over the images.
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; give --output the name of a file.")
    if output.exists():
        raise ConfigError(f"{output} is there already; remove it or choose another --output.")
    if not output.parent.is_dir():
        raise ConfigError(f"The folder {output.parent} does not exist; create it or choose another --output.")
    skipped: list[str] = []
    told: list[str] = []
    rows, early = 0, None
    with write_beside(output) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        table = csv.writer(text)
        table.writerow(field.name for field in fields(Prediction))
        try:
            for prediction in iterate_predictions(network, card, images, skipped.append):
                name = _readable(prediction.path)
                table.writerow((name, *astuple(prediction)[1:]))
                rows += 1
                if rows <= TOLD:
                    told.append(f"{name}: {prediction.label}, {prediction.confidence:.1%}")
        except (Exception, KeyboardInterrupt) as error:
            if rows == 0:
                raise
            early = error
        text.detach()
    written = f"Wrote {rows} prediction{'' if rows == 1 else 's'} to {output}"
    if isinstance(early, KeyboardInterrupt):
        raise KeyboardInterrupt(f"Interrupted. {written}; those of the other images are missing.")
    if isinstance(early, OpteqError):
        raise OpteqError(f"{early} {written}; those of the other images are missing.") from early
    if early is not None:
        raise early
    few = told if rows <= TOLD else []
    return "\n".join([*few, f"{written}.", *(f"Skipped: {text}" for text in skipped)])


def default_output(run: Path) -> Path:
    """The first of `predictions.csv`, `predictions-2.csv` and so on that a run does not have yet."""
    names = ("predictions.csv" if number == 1 else f"predictions-{number}.csv" for number in count(1))
    return next(run / name for name in names if not (run / name).exists())


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
        skip: Receives the reason, which names the file, for each that cannot be read, and a sentence about
            the files that are not named like images; a warning unless given.

    Raises:
        ConfigError: The network does not classify whole images, the folder is missing or empty, or no image
            in it can be read.
    """
    return list(iterate_predictions(network, card, images, skip))


def iterate_predictions(
    network: nn.Module, card: ModelCard, images: str | Path, skip: Callable[[str], None]
) -> Iterator[Prediction]:
    """What `predict_images` returns, one by one."""
    if not isinstance(card.image_size, int) or card.task != "classification":
        raise ConfigError(
            "Predictions are classes of whole images, but this network classifies pixels; load it with "
            "opteq.load(RUN) and call it on a batch of images."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device).eval()
    preprocess = Preprocess(Normalization(card.mean, card.std))
    files = [Path(images)] if Path(images).is_file() else find_images(Path(images), skip)
    found, reason = False, None
    for start in follow(range(0, len(files), BATCH_SIZE), "Classifying"):
        pixels: dict[Path, Tensor] = {}
        for path in files[start : start + BATCH_SIZE]:
            try:
                pixels[path] = read_image(path, card.in_channels, card.image_size)
            except ConfigError as error:
                reason = error
                skip(str(error))
        if not pixels:
            continue
        found = True
        batch, _ = preprocess(
            (torch.stack(list(pixels.values())), torch.zeros(len(pixels), dtype=torch.long))
        )
        ends = _Ends()
        # Not around the loop: what is done with a prediction is none of its business.
        with torch.no_grad(), solve_log(network, SolveLog(forward=ends)):
            logits = network(batch.to(device))
        confidences, labels = logits.softmax(1).max(1)
        converged, residuals = ends.per_image(len(batch))
        rows = zip(labels.tolist(), confidences.tolist(), converged.tolist(), residuals.tolist(), strict=True)
        for path, (label, *numbers) in zip(pixels, rows, strict=True):
            yield Prediction(path, card.class_names[label], *numbers)
    if not found:
        whole = ConfigError(f"None of the {len(files)} images in {images} could be read.")
        raise reason if reason is not None and len(files) == 1 else whole


def _readable(path: Path) -> str:
    return str(Path(*map(readable, path.parts)))


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
