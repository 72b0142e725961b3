"""The network of a run, and images of its test set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import count, islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from opteq.configs import read_config
from opteq.data.facts import Facts
from opteq.errors import ConfigError, OpteqError
from opteq.models.loading import ModelCard, load
from opteq.models.parts import build
from opteq.show.viewer import Sample, Viewer
from opteq.training.runs import CONFIG

SAMPLES = 24


def open_viewer(run: Path, trust: bool = False) -> Viewer:
    """A viewer of the network of a run, or of a pretrained one.

    Where its test images cannot be had, it has none and says why.

    Args:
        run: folder of a finished run, or the name of a pretrained network.
        trust: whether the run may name classes that are not opteq's, see `opteq.load`.

    Raises:
        ConfigError: if there is no such network, see `opteq.load`.
    """
    network, card = load(run, trust), ModelCard.read(run)
    samples, absent = [], ""
    try:
        samples = list(islice(_test_images(run, trust), SAMPLES))
    except (OpteqError, OSError) as error:
        absent = f"There are no test images to choose from: {error}"
    title = run.resolve().name if run.is_dir() else str(run)
    return Viewer(title, network, card, samples, absent)


def _test_images(run: Path, trust: bool) -> Iterator[Sample]:
    """The images of the test set that the run was evaluated on, with their classes."""
    config = read_config(str(run / CONFIG) if run.is_dir() else str(run))
    data: Any = build(config.get("data"), trust)
    if not hasattr(data, "setup"):
        raise ConfigError(f"the configuration of {run} names no data.")
    data.prepare_data()
    data.setup("test")
    facts = Facts(data, "test")
    loader, places = _spread(facts.test_dataloader())
    rows = (row for images, labels in loader for row in zip(images, labels, strict=True))
    for place, (image, label) in zip(places, rows, strict=False):
        yield Sample(image[None], _name(place + 1, label, facts), label)


def _spread(loader: Iterable[Sequence[Tensor]]) -> tuple[Iterable[Sequence[Tensor]], Iterable[int]]:
    """Batches of images spread evenly over a test set, which often has its classes in turn, and their places.

    Where no image can be had without those before it, the first ones.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader, count()
    if not isinstance(loader.dataset, Sized):
        return loader, count()
    total = len(loader.dataset)
    shown = min(SAMPLES, total)
    places = [i * total // shown for i in range(shown)]
    chosen = Subset(loader.dataset, places)
    return DataLoader(chosen, batch_size=SAMPLES, collate_fn=loader.collate_fn), places


def _name(number: int, label: Tensor, facts: Facts) -> str:
    # A scene has a class for each pixel.
    of_class = f", {facts.class_names[int(label)]}" if label.dim() == 0 else ""
    return f"test image {number}{of_class}"
