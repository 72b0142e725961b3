"""Whether what is asked about is what can be asked about."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.layer import EquilibriumLayer
from opteq.options import check, is_number
from opteq.results import State, map_state


def expect_layer(layer: object) -> None:
    """Raise a `ConfigError` unless `layer` is an equilibrium layer."""
    if not isinstance(layer, EquilibriumLayer):
        raise ConfigError(
            f"Expected an EquilibriumLayer, got {type(layer).__name__}; ask about a layer inside it, and what"
            " that layer reads."
        )


def expect_size(size: object) -> None:
    """Raise a `ConfigError` unless `size` is that of a perturbation."""
    check(is_number(size) and size >= 0, "size", size, "at least 0 and finite")


def example_of(x: State, module: nn.Module) -> Any:
    """One input like those of `x`, of which there may be none, in the dtype of the weights of `module`.

    For questions that only the shape of an input matters to.

    Raises:
        ShapeError: if `x` is no batch.
    """
    for t in x if isinstance(x, tuple) and x else (x,):
        if not isinstance(t, Tensor) or not t.dim():
            got = "()" if isinstance(t, Tensor) else type(t).__name__
            raise ShapeError(f"Expected `x` to be a tensor of shape (batch, ...), got {got}.")
    like = next(module.parameters(), None)

    def first(t: Tensor) -> Tensor:
        one = t[:1] if len(t) else t.new_zeros(1, *t.shape[1:])
        return one if like is None or not like.is_floating_point() else one.to(like)

    return map_state(first, x)
