"""Image classifiers of several branches, each an equilibrium at its own resolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.gradients.base import GradientMethod
from opteq.maps.base import EquilibriumMap
from opteq.maps.gaussian import GaussianMap
from opteq.maps.kernel import KernelMap
from opteq.maps.kernelbranches import KernelMOptEq
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.parallel import Parallel
from opteq.models.classifier import ImageClassifier, equilibrium_layer, linear_head
from opteq.models.fusion import PooledFeatures
from opteq.models.fusion import fusion as fusion_named
from opteq.models.stem import convolutional_stem
from opteq.objectives.coupling import HeritageDiversity
from opteq.objectives.patches import Patches
from opteq.operators.base import LinearOperator
from opteq.operators.compose import Compose
from opteq.operators.conv import Conv2d
from opteq.operators.resample import AveragePool
from opteq.results import State, tensors_of
from opteq.solvers.base import Solver


class BranchClassifier(ImageClassifier):
    """`x ↦ stem ↦ equilibria of all branches ↦ fusion ↦ average pool ↦ linear head`.

    The subclasses choose the map. Images `(batch, in_channels, H, W)`, logits `(batch, classes)`. Nothing
    is normalised after the stem.

    Args:
        branches: an equilibrium map whose readout is a tuple of tensors `(batch, channels, h_i, w_i)`.
        count: number of branches.
        channels: channels of every branch.
        in_channels: channels of the images.
        classes: number of classes.
        stem: channels after each 3×3 convolution of the stem but the last, which has `channels`.
        downsamplings: how many convolutions of the stem, from the first, halve height and width.
        fusion: `"concat"`, `"sum"`, `"conv"` or `"average"`, see `opteq.models.fusion`.
        pool: height and width that what is fused is averaged to before the head.
        dropout: probability of dropping a feature before the head.
        solver: solver of the layer; None with a gradient that replaces the solve.
        gradient: gradient method of the layer.

    Raises:
        ConfigError: for an unknown fusion or numbers out of range.
    """

    def __init__(
        self,
        branches: EquilibriumMap,
        count: int,
        channels: int,
        in_channels: int,
        classes: int,
        stem: Sequence[int],
        downsamplings: int,
        fusion: str,
        pool: int,
        dropout: float,
        solver: Solver | None,
        gradient: GradientMethod | None,
    ) -> None:
        if min(in_channels, classes, channels, pool) < 1:
            raise ConfigError("Expected positive channels, classes and pool.")
        layer = equilibrium_layer(branches, solver, gradient)
        extractor = convolutional_stem(in_channels, [*stem, channels], downsamplings)
        super().__init__(in_channels, classes, extractor, layer)
        self.fusion, outputs = fusion_named(fusion, count, channels)
        self.pool = PooledFeatures(pool)
        self.head = linear_head(outputs * channels * pool**2, classes, dropout)

    @property
    def stages(self) -> list[nn.Module]:
        """What `forward` applies in turn, for certificates."""
        return [self.stem, self.equilibria, self.fusion, self.pool, self.head]

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits; raises as `features` does."""
        return self.classify(self.features(x))

    def classify(self, equilibria: State) -> Tensor:
        """`(batch, classes)` logits of equilibria that `features` gave."""
        return self.head(self.pool(self.fusion(tensors_of(equilibria))))


class POptEqClassifier(BranchClassifier):
    """A classifier of parallel OptEq units (POptEq, Li et al. 2022, §A.1).

    `z_i = W_iᵀσ(W_i z_i + U_i g(x))` with 3×3 convolutions `W_i`; `U_i` averages the features `g(x)` over
    blocks of `reductions[i]` pixels before its 3×3 convolution.

    With the default shapes it has 193,306 parameters, with `fusion="conv"` 276,250 (193k and 276k in
    Table 1 of the paper).

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of every state `z_i`.
        hidden: channels of `W_i z_i`, one number per branch.
        reductions: by what each branch's size is smaller than that of the features.
        activation: name of an activation in `opteq.activations`.
        bias: whether the units have a bias.
        max_norm: ceiling on every `‖W_i‖₂`, or None.
        stem, downsamplings, fusion, pool, dropout, solver, gradient: see `BranchClassifier`.

    Raises:
        ConfigError: if `hidden` and `reductions` differ in length, or numbers are out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 32,
        hidden: Sequence[int] = (64, 128, 128),
        reductions: Sequence[int] = (1, 1, 1),
        activation: str = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        stem: Sequence[int] = (16,),
        downsamplings: int = 0,
        fusion: str = "concat",
        pool: int = 2,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        units = _units(channels, hidden, reductions, activation, bias, max_norm)
        super().__init__(
            Parallel(units),
            len(units),
            channels,
            in_channels,
            classes,
            stem,
            downsamplings,
            fusion,
            pool,
            dropout,
            solver,
            gradient,
        )


class MOptEqClassifier(BranchClassifier):
    """A classifier of coupled OptEq units (MOptEq, Li et al. 2022): `z_i = W_iᵀσ(W_i h_i(z) + U_i g(x))`.

    The shapes are those of `POptEqClassifier`; the coupling `h` adds no parameters. A contraction needs
    `‖W_i‖² L_σ (1 + λ(C-1)) < 1`, which the default `max_norm` ensures for `λ = 0.01` and 32 channels.

    With a polynomial or sigmoid `kernel` (Li et al. 2023, Table 5) the branches are kernel maps, see
    `MOptEq`: `y_i = σ(k'(t_i) U_i g(x) + W_iᵀh_i(z))` with `z_i = W_i y_i`. There are as many parameters, and
    with `ζ` for `max_norm` the condition is `½ζ² L_σ (1 + λ(C-1) + 1) < 1`.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels `C` of every state `z_i`.
        hidden: channels of `W_i z_i`, one number per branch.
        reductions: by what each branch's size is smaller than that of the features.
        coupling: heritage and diversity; `HeritageDiversity()`, which has `λ = 0.01`, unless given.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        perturbation: size `ε` of the perturbations that strengthen the training, 0 for none.
        sweep: `"jacobi"` or `"gauss-seidel"`, see `MOptEq`.
        activation: name of an activation in `opteq.activations`.
        bias: whether the units have a bias.
        max_norm: ceiling on every `‖W_i‖₂`, or None; for kernel maps their `ζ`.
        stem, downsamplings, fusion, pool, dropout, solver, gradient: see `BranchClassifier`.

    Raises:
        ConfigError: for a single branch, an unknown kernel, if `hidden` and `reductions` differ in length,
            or numbers are out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 32,
        hidden: Sequence[int] = (64, 128, 128),
        reductions: Sequence[int] = (1, 1, 1),
        coupling: HeritageDiversity | None = None,
        kernel: str = "linear",
        perturbation: float = 0.1,
        sweep: str = "jacobi",
        activation: str = "relu",
        bias: bool = False,
        max_norm: float | None = 0.85,
        stem: Sequence[int] = (16,),
        downsamplings: int = 0,
        fusion: str = "concat",
        pool: int = 2,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        if kernel == "linear":
            units = _units(channels, hidden, reductions, activation, bias, max_norm)
            branches = MOptEq(units, coupling, sweep, perturbation)
        else:
            units = _kernel_units(channels, hidden, reductions, kernel, activation, bias, max_norm)
            branches = KernelMOptEq(units, coupling, sweep, perturbation)
        super().__init__(
            branches,
            len(units),
            channels,
            in_channels,
            classes,
            stem,
            downsamplings,
            fusion,
            pool,
            dropout,
            solver,
            gradient,
        )


class ParallelGEQClassifier(BranchClassifier):
    """A classifier of parallel Gaussian kernel maps (GEQ, Li et al. 2023, §4; KerDEQ with `gamma=0.5`).

    Every branch is a `GaussianMap` with patches, a 3×3 convolution `W_i`, and a `U_i` that averages the
    features over blocks of `reductions[i]` pixels before its 3×3 convolution.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of every state `y_i`.
        hidden: channels of `W_i y_i`, one number per branch, split into patches.
        reductions: by what each branch's size is smaller than that of the features.
        patch_channels: channels in a patch.
        patch_size: height and width of a patch, which must divide those of every branch; None for the plain
            kernel on whole samples.
        patch_hidden: columns of the patch projections `W_h`.
        gamma: a positive number or `"adaptive"`.
        activation: name of an activation in `opteq.activations`.
        bias: whether the injections have a bias.
        max_norm: ceiling on every `‖W_i‖₂`, or None.
        stem, downsamplings, fusion, pool, dropout, solver, gradient: see `BranchClassifier`.

    Raises:
        ConfigError: if `hidden` and `reductions` differ in length, or numbers are out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 256,
        hidden: Sequence[int] = (64, 128, 128, 128, 256, 256),
        reductions: Sequence[int] = (1, 2, 4, 4, 8, 8),
        patch_channels: int = 8,
        patch_size: int | None = 2,
        patch_hidden: int = 64,
        gamma: float | str = "adaptive",
        activation: str = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        stem: Sequence[int] = (256,),
        downsamplings: int = 0,
        fusion: str = "average",
        pool: int = 1,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        maps = [
            GaussianMap(
                Conv2d(channels, n, 3),
                _injection(channels, n, reduction),
                None if patch_size is None else Patches(patch_channels, patch_size),
                patch_hidden,
                gamma,
                activation=activation,
                bias=bias,
                max_norm=max_norm,
            )
            for n, reduction in _branches(hidden, reductions)
        ]
        super().__init__(
            Parallel(maps),
            len(maps),
            channels,
            in_channels,
            classes,
            stem,
            downsamplings,
            fusion,
            pool,
            dropout,
            solver,
            gradient,
        )


class ParallelKernelClassifier(BranchClassifier):
    """A classifier of parallel kernel maps with a kernel of an inner product (Li et al. 2023, Table 5).

    Every branch is a `KernelMap` with a 3×3 convolution `W_i`, and a `U_i` that averages the features over
    blocks of `reductions[i]` pixels before its 3×3 convolution to the channels of the state.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of every state `y_i`.
        hidden: channels of `W_i y_i`, one number per branch.
        reductions: by what each branch's size is smaller than that of the features.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        activation: name of an activation in `opteq.activations`.
        bias: whether the injections have a bias.
        max_norm: the ceiling `ζ` of `KernelMap`, or None.
        stem, downsamplings, fusion, pool, dropout, solver, gradient: see `BranchClassifier`.

    Raises:
        ConfigError: for an unknown kernel, if `hidden` and `reductions` differ in length, or numbers are
            out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 32,
        hidden: Sequence[int] = (64, 128, 128),
        reductions: Sequence[int] = (1, 1, 1),
        kernel: str = "sigmoid",
        activation: str = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        stem: Sequence[int] = (16,),
        downsamplings: int = 0,
        fusion: str = "concat",
        pool: int = 2,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        maps = [
            KernelMap(
                Conv2d(channels, n, 3),
                _injection(channels, channels, reduction),
                kernel,
                activation=activation,
                bias=bias,
                max_norm=max_norm,
            )
            for n, reduction in _branches(hidden, reductions)
        ]
        super().__init__(
            Parallel(maps),
            len(maps),
            channels,
            in_channels,
            classes,
            stem,
            downsamplings,
            fusion,
            pool,
            dropout,
            solver,
            gradient,
        )


def _units(
    channels: int,
    hidden: Sequence[int],
    reductions: Sequence[int],
    activation: str,
    bias: bool,
    max_norm: float | None,
) -> list[OptEqUnit]:
    return [
        OptEqUnit(
            Conv2d(channels, n, 3), _injection(channels, n, reduction), activation, bias, max_norm=max_norm
        )
        for n, reduction in _branches(hidden, reductions)
    ]


def _kernel_units(
    channels: int,
    hidden: Sequence[int],
    reductions: Sequence[int],
    kernel: str,
    activation: str,
    bias: bool,
    max_norm: float | None,
) -> list[KernelMap]:
    return [
        KernelMap(
            Conv2d(n, channels, 3),
            _injection(channels, n, reduction),
            kernel,
            activation=activation,
            bias=bias,
            max_norm=max_norm,
        )
        for n, reduction in _branches(hidden, reductions)
    ]


def _injection(in_channels: int, out_channels: int, reduction: int) -> LinearOperator:
    convolution = Conv2d(in_channels, out_channels, 3)
    return convolution if reduction == 1 else Compose(AveragePool(in_channels, reduction), convolution)


def _branches(hidden: Sequence[int], reductions: Sequence[int]) -> list[tuple[int, int]]:
    for name, numbers in (("hidden", hidden), ("reductions", reductions)):
        if not isinstance(numbers, Sequence):
            raise ConfigError(f"Expected `{name}` to be a list with one number per branch, got {numbers!r}.")
    if len(hidden) != len(reductions) or not hidden:
        raise ConfigError(
            f"Expected one number of `hidden` channels and one of `reductions` per branch, got {len(hidden)}"
            f" and {len(reductions)}."
        )
    return list(zip(hidden, reductions, strict=True))
