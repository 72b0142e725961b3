"""Modules in float64, in which certificates look at them."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.base import share_norm_bounds

M = TypeVar("M", bound=nn.Module)


def in_float64(module: M) -> M:
    """A copy of `module` with the same weights in float64.

    What bounds on norms of these weights cost, seconds for a large convolution, is paid once: the copies of a
    module share them.

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
        copied = copy.deepcopy(module, plain).double()
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be copied into float64, where certificates look at it: {error}"
        ) from error
    share_norm_bounds(module, copied)
    return copied
