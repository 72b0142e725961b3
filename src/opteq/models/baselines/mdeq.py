"""Multiscale deep equilibrium models (Bai et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.blocks import Block, BlockMap
from opteq.models.baselines.deq import START, check_groups
from opteq.models.bodies import Equilibrium
from opteq.models.parts import known
from opteq.options import check, is_number

Branches = tuple[Tensor, ...]


class BranchBlock(nn.Module):
    """`n₃(relu(z + n₂(mask · K₂ relu(n₁(K₁ z)) + x)))`, a residual block at one resolution.

    Args:
        channels: channels of `z`.
        expansion: how many times as many `K₁ z` has.
        groups: of the norms.
    """

    def __init__(self, channels: int, expansion: int, groups: int) -> None:
        super().__init__()
        wide = expansion * channels
        self.first = nn.Conv2d(channels, wide, 3, padding=1, bias=False)
        self.second = nn.Conv2d(wide, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, n) for n in (wide, channels, channels))

    def forward(self, z: Tensor, x: Tensor | None, mask: Tensor | None) -> Tensor:
        out = self.second(F.relu(self.norms[0](self.first(z))))
        if mask is not None:
            out = out * mask
        out = self.norms[1](out if x is None else out + x)
        return self.norms[2](F.relu(out + z))


class BranchFusion(nn.Module):
    """`n(K relu(Σ_j P_j y_j))`, what branch `target` makes of all of them, with a 1×1 convolution `K`.

    `P_j` from a finer branch are strided 3×3 convolutions with group norm, and ReLU between them; from a
    coarser one a 1×1 convolution with group norm and nearest up-sampling.
    """

    def __init__(self, widths: Sequence[int], target: int, groups: int) -> None:
        super().__init__()
        width = widths[target]
        self.ways = nn.ModuleList(_way(widths, source, target, groups) for source in range(len(widths)))
        self.mixer = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.GroupNorm(max(groups // 2, 1), width)
        for convolution in self.ways.modules():
            if isinstance(convolution, nn.Conv2d):
                nn.init.normal_(convolution.weight, std=START)

    def forward(self, y: Sequence[Tensor]) -> Tensor:
        fused = reduce(torch.add, (way(y_j) for way, y_j in zip(self.ways, y, strict=True)))
        return self.norm(self.mixer(F.relu(fused)))


class MultiscaleBlock(Block):
    """A `BranchBlock` at every resolution, then a `BranchFusion` into each.

    The kernels of the blocks and the last ones of the fusions are weight normalised. Of the branches the
    first one is given the injection, and each has a dropout mask of its own, one number for every channel of
    a sample, constant in a solve (variational dropout).

    Args:
        widths: channels of the branches, each at half the height and width of the one before.
        expansion: see `BranchBlock`.
        groups: of the norms; those after the fusions have half as many.
        dropout: probability that a channel is dropped in training.
    """

    def __init__(self, widths: Sequence[int], expansion: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.widths, self.dropout = list(widths), dropout
        self.branches = nn.ModuleList(BranchBlock(n, expansion, groups) for n in widths)
        self.fusions = nn.ModuleList(BranchFusion(widths, i, groups) for i in range(len(widths)))
        kernels = [name for name, parameter in self.named_parameters() if parameter.dim() == 4]
        self._normalised = [name for name in kernels if ".ways." not in name]
        self.gains = nn.ParameterList(
            _lengths(self.get_parameter(name).detach()) for name in self._normalised
        )

    def acting(self) -> dict[str, Tensor]:
        """With `g_o V_o/‖V_o‖` for every normalised filter `V_o` (Salimans and Kingma 2016)."""
        acting: dict[str, Tensor] = {
            name: p for name, p in self.named_parameters() if not name.startswith("gains")
        }
        for name, gain in zip(self._normalised, self.gains, strict=True):
            acting[name] = acting[name] * (gain / _lengths(acting[name]))
        return acting

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The injection and, in training with dropout, the masks."""
        if not self.training or not self.dropout:
            return (x,)
        kept = 1 - self.dropout
        return x, *(x.new_empty(len(x), n, 1, 1).bernoulli_(kept) / kept for n in self.widths)

    def initial(self, x: Tensor) -> Branches:
        coarsest = 2 ** (len(self.widths) - 1)
        if any(n % coarsest for n in x.shape[2:]):
            raise ShapeError(
                f"Expected `x` with a height and a width that {coarsest} divides, got {tuple(x.shape[2:])};"
                " change the image size or the number of branches."
            )
        return tuple(
            x.new_zeros(len(x), n, x.shape[2] >> i, x.shape[3] >> i) for i, n in enumerate(self.widths)
        )

    def forward(self, z: Branches, x: Tensor, *masks: Tensor) -> Branches:
        injections = [x, *[None] * (len(z) - 1)]
        parts = zip(self.branches, z, injections, masks or [None] * len(z), strict=True)
        blocks = [branch(*rest) for branch, *rest in parts]
        return tuple(fuse(blocks) for fuse in self.fusions)


class MDEQ(Equilibrium):
    """Multiscale deep equilibrium model: one equilibrium over several resolutions (Bai et al. 2020).

    Gives a tuple of tensors, one per branch. Its authors train the first epochs on a few unrolled iterations,
    see `opteq.training.warmup.UnrolledWarmup`.

    Args:
        channels: channels of the features.
        widths: channels of the branches, each at half the height and width of the one before.
        expansion: how many times as many channels each residual block has within.
        groups: of the group norms, a divisor of all widths.
        dropout: probability that a channel is dropped in training.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: for a single branch or numbers out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        widths: Sequence[int] = (32, 64, 128, 256),
        *,
        expansion: int = 5,
        groups: int = 8,
        dropout: float = 0.0,
        **methods: Any,
    ) -> None:
        channels = known("channels", channels)
        if not isinstance(widths, Sequence) or len(widths) < 2:
            raise ConfigError(f"Expected a list of at least two `widths`, got {widths!r}.")
        widths = [known("widths", n) for n in widths]
        check_groups(groups, *widths)
        check(is_number(dropout) and 0 <= dropout < 1, "dropout", dropout, "at least 0 and below 1")
        block = MultiscaleBlock(widths, known("expansion", expansion), groups, dropout)
        injection = nn.Sequential(
            nn.Conv2d(channels, widths[0], 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        super().__init__(BlockMap(block, injection), **methods)


def _way(widths: Sequence[int], source: int, target: int, groups: int) -> nn.Module:
    """From branch `source` to the size and channels of branch `target`."""
    a, b = widths[source], widths[target]
    if source == target:
        return nn.Identity()
    if source > target:
        enlarge = nn.Upsample(scale_factor=2 ** (source - target), mode="nearest")
        return nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.GroupNorm(groups, b), enlarge)
    layers: list[nn.Module] = []
    for step in range(source, target):
        last = step == target - 1
        n = b if last else a
        layers += [nn.Conv2d(a, n, 3, 2, padding=1, bias=False), nn.GroupNorm(groups, n)]
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


def _lengths(kernel: Tensor) -> Tensor:
    """`‖V_o‖` of every filter, in a shape that multiplies the kernel."""
    return torch.linalg.vector_norm(kernel, dim=(1, 2, 3), keepdim=True)
