"""The deep equilibrium model of one residual block."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from opteq.models.baselines.blocks import Block, BlockMap
from opteq.models.bodies import Equilibrium
from opteq.models.parts import known
from opteq.options import check

# Small kernels make the first iterations contract.
START = 0.01


class ResidualBlock(Block):
    """`f(z; x) = n₃(relu(z + n₂(x + K₂ n₁(relu(K₁ z)))))` with group norms `n` and 3×3 convolutions `K`.

    The block of the tutorial of Kolter, Duvenaud and Johnson (Deep implicit layers, NeurIPS 2020).

    Args:
        channels: channels of `z` and `x`.
        hidden: channels of `K₁ z`.
        groups: of the norms.
    """

    def __init__(self, channels: int, hidden: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, hidden, 3, padding=1, bias=False)
        self.second = nn.Conv2d(hidden, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, n) for n in (hidden, channels, channels))
        for convolution in (self.first, self.second):
            nn.init.normal_(convolution.weight, std=START)

    def initial(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        hidden = self.norms[0](F.relu(self.first(z)))
        return self.norms[2](F.relu(z + self.norms[1](x + self.second(hidden))))


class DEQ(Equilibrium):
    """The plain deep equilibrium model: one weight-tied residual block (Bai et al. 2019).

    Args:
        channels: channels of the features and of the state.
        hidden: channels within the block.
        groups: of the group norms, a divisor of both.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(
        self, channels: int | None = None, hidden: int = 64, groups: int = 8, **methods: Any
    ) -> None:
        channels, hidden = known("channels", channels), known("hidden", hidden)
        check_groups(groups, channels, hidden)
        super().__init__(BlockMap(ResidualBlock(channels, hidden, groups)), **methods)


def check_groups(groups: int, *channels: int) -> None:
    """Raise a `ConfigError` unless `groups` divide all these numbers of channels."""
    divides = all(n % known("groups", groups) == 0 for n in channels)
    check(divides, "groups", groups, f"a divisor of the channels {', '.join(map(str, channels))}")
