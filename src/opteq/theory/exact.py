"""Copies of modules, as they are and in float64, in which certificates look at them."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.base import share_norm_bounds

M = TypeVar("M", bound=nn.Module)


def in_float64(module: M) -> M:
    """A copy of `module` with the same weights in float64, see `copied`."""
    return copied(module, torch.float64).double()


def copied(module: M, dtype: torch.dtype | None = None) -> M:
    """A copy of `module`, also where a weight norm left tensors in a graph.

    What bounds on norms of its weights cost, seconds for a large convolution, is paid once: the copies of a
    module share them.

    Args:
        module: the module.
        dtype: of the floating-point tensors that are neither parameters nor buffers; their own unless given.

    Raises:
        ConfigError: if it cannot be copied.
    """
    plain = {
        id(value): value.detach().to(dtype or value.dtype, copy=True)
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    try:
        other = copy.deepcopy(module, plain)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(module).__name__} cannot be copied, which certificates and changed settings need: {error}"
        ) from error
    share_norm_bounds(module, other)
    return other
