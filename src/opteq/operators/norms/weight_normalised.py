"""Filters of a length that is learned by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.operators.norms.base import NormControl
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class WeightNormalised(NormControl):
    """`W_o = g_o V_o / ‖V_o‖` for every filter `o` (Salimans and Kingma 2016; Li et al. 2023, §4.1).

    The lengths `g`, the parameter `gain`, start as those of the initial filters. It conditions the training
    and bounds no operator norm: a `ζ` is not kept.
    """

    def install(self, operator: nn.Module) -> None:
        operator.register_parameter("gain", nn.Parameter(_lengths(super().weight(operator).detach())))

    def weight(self, operator: nn.Module) -> Tensor:
        v = super().weight(operator)
        gain: Tensor = operator.gain  # type: ignore[assignment]
        return v * (gain / _lengths(v).clamp(min=torch.finfo(v.dtype).tiny))


def _lengths(weight: Tensor) -> Tensor:
    """`‖V_o‖`, in a shape that multiplies the weight."""
    length = weight.flatten(1).norm(dim=1)
    return length.view(-1, *[1] * (weight.dim() - 1))
