"""What a suite is given, and what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.data.facts import Facts
from opteq.evaluation.parts import Parts
from opteq.evaluation.passes import Spread, count_of, logits_of, share_of
from opteq.evaluation.robustness import has_autoattack
from opteq.evaluation.table import Table

Batches = Iterable[Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What can be chosen of the suites.

    Attributes:
        images: at most so many test images, evenly spread over all; None for all.
        corrupted: folder of the published arrays; None to corrupt the test images.
        unknown: folder of images of unknown classes; None for the classes that were left out of the training.
        epsilons: largest changes of a pixel in [0, 1] by attacks.
        restarts: attacks on each image.
        autoattack: whether to run AutoAttack too; unless given, where it is installed.
    """

    images: int | None = None
    corrupted: str | None = None
    unknown: str | None = None
    epsilons: list[float] = field(default_factory=lambda: [k / 255 for k in (1, 2, 4, 8)])
    restarts: int = 2
    autoattack: bool = field(default_factory=has_autoattack)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a suite found.

    Attributes:
        scores: the numbers, in plain values.
        tables: the same to read.
        figures: by the end of the file's name, empty for the one that is named like the suite.
    """

    scores: Mapping[str, Any]
    tables: Sequence[Table]
    figures: Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Case:
    """A network to evaluate, where its parameters are, and the data, set up for the test stage."""

    network: nn.Module
    data: Facts
    options: SuiteOptions
    parts: Parts

    def chosen(self, loader: Batches) -> Spread:
        """As many of the images of a loader as are asked for."""
        return Spread(loader, share_of(loader, self.options.images))

    def left_out(self, loader: Batches) -> str:
        """How many images of a loader are left out as fewer are asked for, in brackets, if any are."""
        number = 0 if self.options.images is None else count_of(loader) - self.options.images
        return f" ({number:,} left out by --suite_images)" if number > 0 else ""

    def images(self, loader: Batches) -> str:
        """How many of the images of a loader are evaluated on, and how many are left out."""
        count = count_of(loader)
        used = count if self.options.images is None else min(count, self.options.images)
        return f"{used:,} images{self.left_out(loader)}"

    def logits(self, loader: Batches) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Logits and labels of these."""
        return logits_of(self.network, self.parts.follow(self.chosen(loader)))


def percent(values: Iterable[float]) -> list[str]:
    """Shares as texts."""
    return [f"{value:.2%}" for value in values]
