"""What passes over a test set have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opteq.errors import NonFiniteError
from opteq.evaluation.stored import Stored
from opteq.evaluation.trace import Traces
from opteq.layer import SolveLog


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
