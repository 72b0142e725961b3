"""Filters of a length that is learned by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.operators.norms.base import NormControl, unit_of
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class WeightNormalised(NormControl):
    """`W_o = g_o V_o / ‖V_o‖` for every filter `o` (Salimans and Kingma 2016; Li et al. 2023, §4.1).

    The lengths `g`, the parameter `gain`, start as those of the initial filters. A filter of zeros has no
    direction, and stays what it is until a gradient gives it one. It conditions the training and bounds no
    operator norm: a `ζ` is not kept.
    """

    def install(self, operator: nn.Module) -> None:
        operator.register_parameter("gain", nn.Parameter(_lengths(super().weight(operator).detach())))

    def weight(self, operator: nn.Module) -> Tensor:
        v = super().weight(operator)
        v = v / unit_of(v)
        gain: Tensor = operator.gain  # type: ignore[assignment]
        length = _lengths(v)
        return gain * (v / torch.where(length > 0, length, 1.0))


def _lengths(weight: Tensor) -> Tensor:
    """`‖V_o‖`, in a shape that multiplies the weight."""
    length = weight.flatten(1).norm(dim=1)
    return length.view(-1, *[1] * (weight.dim() - 1))
