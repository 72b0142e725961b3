"""What passes over a test set have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opteq.errors import NonFiniteError


@contextmanager
def evaluating(network: nn.Module, device: torch.device | str) -> Iterator[torch.dtype]:
    """Without gradients and in eval mode on `device`; gives the type of the network's numbers.

    Afterwards the network is in the mode it was in.
    """
    was_training = network.training
    network.eval().to(device)
    try:
        with torch.no_grad():
            yield next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    finally:
        network.train(was_training)


def refuse_non_finite(logits: Tensor) -> None:
    """Raise a `NonFiniteError` if there are images with logits that no score can be computed from."""
    bad = int((~torch.isfinite(logits)).flatten(1).any(1).sum())
    if bad:
        raise NonFiniteError(
            f"The network answered NaN or infinity for {bad} of {len(logits)} images"
            " of a test batch: training has diverged; lower the learning rate or use an earlier"
            " checkpoint."
        )


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
