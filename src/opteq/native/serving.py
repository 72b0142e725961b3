"""Whether compiled code is used: the one rule."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq import native


def serves(*tensors: Tensor, error: float) -> bool:
    """Whether compiled code may do what is to be done with these tensors to a relative `error`.

    It may where some error is allowed, 0 being as exact as the dtype, and where it can `take` the tensors. To
    that, kernels add only their own questions: whether shapes fit, and whether it pays.
    """
    return error > 0 and takes(*tensors)


def takes(*tensors: Tensor) -> bool:
    """Whether compiled code can take these tensors for the numbers that lie in their memory.

    It can where it is to be had and enabled, the tensors are float32 on a CPU without a sign still to be
    applied, no graph is wanted of them, and PyTorch does nothing else with operations than carry them out: no
    autocast, compilation or tracing.
    """
    if not native.available() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    graph = torch.is_grad_enabled()
    # A loop takes half the time of `all`, at every step of every solve.
    for t in tensors:
        if t.dtype != torch.float32 or not t.is_cpu or t.is_neg() or (graph and t.requires_grad):
            return False
    return True


def reads(*matrices: Tensor) -> bool:
    """Whether compiled code can take these matrices, which may have gaps between their rows."""
    for m in matrices:
        if m.stride(1) != 1 and m.shape[1] != 1:
            return False
    return takes(*matrices)
