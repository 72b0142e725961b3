"""What passes over a test set have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.errors import ConfigError, NonFiniteError
from opteq.evaluation.stored import Stored
from opteq.evaluation.trace import Traces
from opteq.solvelog import SolveLog


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards every module is in the mode it was in, such as a frozen batch norm."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(network: nn.Module, device: torch.device | str) -> Iterator[torch.dtype]:
    """In eval mode, without gradients and on `device`; gives the type of the network's numbers."""
    with eval_mode(network.to(device)), torch.no_grad():
        yield next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)


class Spread:
    """Batches with a share of the images of others, evenly spread over all: test sets are often in order.

    Args:
        loader: batches `(images, labels)`.
        share: of the images.
    """

    def __init__(self, loader: Iterable[Sequence[Tensor]], share: float) -> None:
        self._loader, self._share = loader, share

    def __length_hint__(self) -> int:
        return math.ceil(length_hint(self._loader) * self._share)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen, size = 0, 0
        held: list[tuple[Tensor, Tensor]] = []
        for images, labels in self._loader:
            size = size or len(images)
            places = torch.arange(seen, seen + len(images) + 1, dtype=torch.float64)
            # Rounded: 25 times the share of 7 in 25 is above 7 in floating point.
            chosen = (places * self._share).round(decimals=6).ceil().diff() > 0
            seen += len(images)
            held.append((images[chosen], labels[chosen]))
            # Batches of a few images would take as long as whole ones.
            if sum(len(rows) for _, rows in held) >= size:
                yield _joined(held)
                held = []
        if any(len(rows) for _, rows in held):
            yield _joined(held)


def _joined(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def share_of(loader: Iterable[Sequence[Tensor]], images: int | None) -> float:
    """The share of the images of a loader that is so many of them; all for None."""
    return 1.0 if images is None else min(1.0, images / max(count_of(loader), 1))


def count_of(loader: Iterable[Sequence[Tensor]]) -> int:
    """The number of images of a loader."""
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else sum(len(labels) for _, labels in loader)


def device_of(network: nn.Module) -> torch.device:
    """Where the parameters of a network are."""
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def logits_of(
    network: nn.Module, loader: Iterable[Sequence[Tensor]]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The logits of a network, in eval mode, and the labels.

    Args:
        network: maps images to logits `(batch, classes)`; left in the mode it was in.
        loader: batches `(images, labels)`.

    Returns:
        `(samples, classes)` and `(samples,)`.

    Raises:
        ConfigError: if there are no images.
        NonFiniteError: if the network answers NaN or infinity.
    """
    device = device_of(network)
    logits, known = [], []
    with evaluating(network, device) as dtype:
        for images, labels in loader:
            answers = network(images.to(device, dtype)).double().cpu()
            refuse_non_finite(answers)
            logits.append(answers)
            known.append(labels.cpu())
    if not known:
        raise ConfigError("There are no images: give at least one to evaluate on.")
    return torch.cat(logits).numpy(), torch.cat(known).numpy()


def refuse_non_finite(logits: Tensor) -> None:
    """Raise a `NonFiniteError` if there are images with logits that no score can be computed from."""
    bad = int((~torch.isfinite(logits)).flatten(1).any(1).sum())
    if bad:
        raise NonFiniteError(
            f"The network answered NaN or infinity for {bad} of {len(logits)} images"
            " of a batch: training has diverged; lower the learning rate or use an earlier"
            " checkpoint."
        )


@dataclass(frozen=True, slots=True)
class EvaluationRecord(Stored):
    """What the records of all passes over a test set have.

    Attributes:
        class_names: one name per class.
        solves: number of equilibria solved (images × equilibrium layers).
        unconverged: how many of them did not reach their tolerance.
        solver_steps_mean: steps per solve.
        residual_max: largest relative residual left by a solve.
        traces: iterations and equilibria of a few images drawn at random.
    """

    class_names: tuple[str, ...]
    solves: int
    unconverged: int
    solver_steps_mean: float
    residual_max: float
    traces: Traces


def solves_of(log: SolveLog) -> dict[str, Any]:
    """The fields of an `EvaluationRecord` that say how the solves went."""
    forward = log.forward
    return {
        "solves": forward.samples,
        "unconverged": forward.unconverged,
        "solver_steps_mean": forward.steps_mean,
        "residual_max": forward.residual_max,
    }


class Best:
    """The `size` samples of highest score among all that were offered, the highest first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns: tuple[Tensor, ...] = ()

    def offer(self, scores: Tensor, *columns: Tensor) -> None:
        """Offer samples: `scores` of shape `(n,)` and any tensors of shape `(n, ...)` beside."""
        rows = (scores, *columns)
        if self.columns:
            rows = tuple(torch.cat(pair) for pair in zip(self.columns, rows, strict=True))
        best = rows[0].argsort(descending=True, stable=True)[: self.size]
        self.columns = tuple(column[best] for column in rows)
