"""Whether compiled code is used: the one rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _dispatch_keys, _len_torch_dispatch_stack
from torch.autograd import forward_ad

from opteq import native
from opteq.tensors.tracing import tracing

with torch.inference_mode():
    _OF_INFERENCE = torch.empty(0, device="cpu")
# Who is asked when an operator is called with memory on a CPU and nothing else: no sign to be applied, no
# batch of `vmap`, no subclass with operators of its own, no tensor without memory.
_PLAIN = frozenset(_dispatch_keys(t).raw_repr() for t in (torch.empty(0, device="cpu"), _OF_INFERENCE))


def serves(*tensors: Tensor, error: float) -> bool:
    """Whether compiled code may do what is to be done with these tensors, to a relative `error`.

    It may where some error is allowed, 0 being as exact as the dtype, and where it can take the tensors. To
    that kernels add only their own questions: whether the shapes fit, and whether it pays.
    """
    return error > 0 and takes(*tensors)


def takes(*tensors: Tensor) -> bool:
    """Whether compiled code can take these tensors for the numbers that lie in their memory.

    It can where it is to be had and enabled, and the tensors are plain ones of float32 on a CPU of which no
    graph is wanted. Who looks at operators, or puts others in their place, is shown those of PyTorch:
    compilation, tracing, autocast, forward-mode differentiation, the transforms of `torch.func`, and dispatch
    modes, such as counters of floating-point operations.
    """
    if (
        tracing()
        or not native.available()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    graph = torch.is_grad_enabled()
    # A loop takes half the time of `all`, at every step of every solve.
    for t in tensors:
        if t.dtype != torch.float32 or (graph and t.requires_grad):
            return False
        if _dispatch_keys(t).raw_repr() not in _PLAIN:
            return False
    return True


def reads(*matrices: Tensor) -> bool:
    """Whether compiled code can take these matrices, which may have gaps between their rows."""
    for m in matrices:
        if m.stride(1) != 1 and m.shape[1] != 1:
            return False
    return takes(*matrices)


def still_reads(*matrices: Tensor) -> bool:
    """Whether compiled code can take matrices that were made in a solve in which it `reads` the first ones.

    In a fraction of the time, for every step.
    """
    for m in matrices:
        if m.dtype != torch.float32 or not m.is_cpu or m.is_neg() or type(m) is not Tensor:
            return False
        if m.stride(1) != 1 and m.shape[1] != 1:
            return False
    return True
