"""Modules in float64, in which certificates look at them."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


def in_float64(module: M) -> M:
    """A copy of `module` with the same weights in float64.

    Raises:
        ConfigError: if it cannot be copied.
    """
    # Tensors that are no parameters too, of which no copy is made where a weight norm left them in a graph.
    plain = {
        id(value): value.detach().to(torch.float64, copy=True)
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    try:
        return copy.deepcopy(module, plain).double()
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be copied into float64, where certificates look at it: {error}"
        ) from error
