"""Bodies: equilibria of maps made of 3×3 convolutions, between the stem and the head of a classifier.

Each has as many channels as the features it reads. Those with `hidden` channels as one number have a state
of one tensor; with a list, one number per branch, they have a tuple of tensors. Other maps and operators
make a body with `Equilibrium` or `opteq.EquilibriumLayer`, explicit networks are bodies as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from opteq.activations import Activation
from opteq.errors import ConfigError
from opteq.gradients.base import DirectMethod, GradientMethod
from opteq.gradients.implicit import Implicit
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import GaussianMap
from opteq.maps.kernel import KernelMap
from opteq.maps.kernelbranches import KernelMOptEq
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.parallel import Parallel
from opteq.maps.regularised import Regularised
from opteq.models.parts import known
from opteq.objectives.coupling import HeritageDiversity
from opteq.objectives.patches import Patches
from opteq.objectives.regularisers import Regulariser
from opteq.operators.base import LinearOperator
from opteq.operators.compose import Compose, DepthwiseSeparableConv2d
from opteq.operators.conv import Conv2d
from opteq.operators.norms.base import NormControl
from opteq.operators.resample import AveragePool
from opteq.operators.starts import Start
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Solver

M = TypeVar("M", bound=EquilibriumMap)


class Equilibrium(EquilibriumLayer):
    """An equilibrium layer as models use it: samples that do not converge are counted, for the log.

    Args:
        map: the equilibrium map.
        solver: how to find the equilibrium; `Anderson(tol=1e-3)` unless given or replaced by the gradient.
        gradient: how to differentiate it; `Implicit(tol=1e-3)` unless given.
    """

    def __init__(
        self, map: EquilibriumMap, solver: Solver | None = None, gradient: GradientMethod | None = None
    ) -> None:
        gradient = Implicit(tol=1e-3) if gradient is None else gradient
        if solver is None and not isinstance(gradient, DirectMethod):
            solver = Anderson(tol=1e-3)
        super().__init__(map, solver, gradient, on_unconverged="count")


class Unit(Equilibrium):
    """The OptEq unit `z = Wᵀσ(W z + U g(x) + b)`, or several in parallel (POptEq, Li et al. 2022, §A.1).

    Args:
        channels: channels of every state `z`.
        hidden: channels of `W z`; a list has one number per branch.
        reductions: by what the size of each branch is smaller than that of the features, which `U` averages
            before its convolution; 1 unless given.
        activation: name of an activation in `opteq.activations`, or an object.
        bias: whether there is a `b`.
        max_norm: ceiling `ζ` on every `‖W‖₂`, or None.
        norm: the way that it is kept; `Ceiling()` unless given.
        weight_start: the initial values of `W`; `UniformStart()` unless given.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: if `hidden` and `reductions` differ in length, or numbers are out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        reductions: Sequence[int] | None = None,
        activation: str | Activation = "relu",
        bias: bool = True,
        max_norm: float | None = 0.97,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        **methods: Any,
    ) -> None:
        weight = _weights(norm, weight_start)
        unit = _unit(known("channels", channels), weight, activation, bias, max_norm)
        super().__init__(_single_or_parallel(unit, hidden, reductions), **methods)


class Coupled(Equilibrium):
    """OptEq units that are coupled by heritage and diversity (MOptEq, Li et al. 2022).

    A contraction needs `‖W_i‖² L_σ (1 + λ(C-1)) < 1`, which the default `max_norm` ensures for `λ = 0.01` and
    32 channels. With a polynomial or sigmoid `kernel` (Li et al. 2023, Table 5) the branches are kernel maps,
    see `MOptEq`; with `ζ` for `max_norm` the condition is `½ζ² L_σ (1 + λ(C-1) + 1) < 1`.

    Args:
        channels: channels `C` of every state `z_i`.
        hidden: channels of `W_i z_i`, one number per branch.
        reductions: see `Unit`.
        coupling: heritage and diversity; `HeritageDiversity()`, which has `λ = 0.01`, unless given.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        perturbation: size `ε` of the perturbations that strengthen the training, 0 for none.
        sweep: `"jacobi"` or `"gauss-seidel"`, see `MOptEq`.
        activation, bias, norm, weight_start: see `Unit`.
        max_norm: ceiling on every `‖W_i‖₂`, or None; for kernel maps their `ζ`.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: for a single branch, an unknown kernel, if `hidden` and `reductions` differ in length,
            or numbers are out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: Sequence[int] = (64, 128, 128),
        reductions: Sequence[int] | None = None,
        coupling: HeritageDiversity | None = None,
        kernel: str = "linear",
        perturbation: float = 0.1,
        sweep: str = "jacobi",
        activation: str | Activation = "relu",
        bias: bool = False,
        max_norm: float | None = 0.85,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        **methods: Any,
    ) -> None:
        state, weight = known("channels", channels), _weights(norm, weight_start)

        def kernel_map(n: int, reduction: int) -> KernelMap:
            # Here `W y` is the state that is coupled.
            W, U = weight(n, state), _injection(state, n, reduction)
            return KernelMap(W, U, kernel, True, activation, bias, max_norm)

        coupling = HeritageDiversity() if coupling is None else coupling
        if kernel == "linear":
            units = _branches(_unit(state, weight, activation, bias, max_norm), hidden, reductions)
            coupled = MOptEq(units, coupling, sweep, perturbation)
        else:
            coupled = KernelMOptEq(_branches(kernel_map, hidden, reductions), coupling, sweep, perturbation)
        super().__init__(coupled, **methods)


class Gaussian(Equilibrium):
    """A Gaussian kernel map with patches (GEQ, Li et al. 2023; KerDEQ with `gamma=0.5`), or parallel ones.

    Args:
        channels: channels of every state `y`.
        hidden: channels of `W y`, split into patches; a list has one number per branch.
        reductions: see `Unit`.
        patch_channels: channels in a patch.
        patch_size: height and width of a patch, which must divide those of every branch; None for the plain
            kernel on whole samples.
        patch_hidden: columns of the patch projections `W_h`.
        gamma: a positive number or `"adaptive"`.
        activation, bias, max_norm, norm, weight_start: see `Unit`.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: if `hidden` and `reductions` differ in length, or numbers are out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        reductions: Sequence[int] | None = None,
        patch_channels: int = 8,
        patch_size: int | None = 2,
        patch_hidden: int = 64,
        gamma: float | str = "adaptive",
        activation: str | Activation = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        **methods: Any,
    ) -> None:
        state, weight = known("channels", channels), _weights(norm, weight_start)
        patches = None if patch_size is None else Patches(patch_channels, patch_size)

        def kernel_map(n: int, reduction: int) -> GaussianMap:
            W, U = weight(state, n), _injection(state, n, reduction)
            return GaussianMap(W, U, patches, patch_hidden, gamma, False, activation, bias, max_norm)

        super().__init__(_single_or_parallel(kernel_map, hidden, reductions), **methods)


class Kernel(Equilibrium):
    """A map with a kernel of an inner product (Li et al. 2023, Table 5), or parallel ones.

    Args:
        channels: channels of every state `y`.
        hidden: channels of `W y`; a list has one number per branch.
        reductions: see `Unit`.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        activation, bias, norm, weight_start: see `Unit`.
        max_norm: the ceiling `ζ` of `KernelMap`, or None.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: for an unknown kernel, if `hidden` and `reductions` differ in length, or numbers are
            out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        reductions: Sequence[int] | None = None,
        kernel: str = "sigmoid",
        activation: str | Activation = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        **methods: Any,
    ) -> None:
        state, weight = known("channels", channels), _weights(norm, weight_start)

        def kernel_map(n: int, reduction: int) -> KernelMap:
            W, U = weight(state, n), _injection(state, state, reduction)
            return KernelMap(W, U, kernel, True, activation, bias, max_norm)

        super().__init__(_single_or_parallel(kernel_map, hidden, reductions), **methods)


class Deep(Equilibrium):
    """A deep OptEq, its units one after the other (Xie et al. 2022, §7).

    The training modes of Algorithm 1 are values of `gradient`: `Implicit()`, `Unrolled(20)`, and
    `Unrolled(20, select=SAM(...))`, which is R†; `regulariser` is R*.

    Args:
        channels: channels of the state.
        hidden: hidden channels of the units, first to last.
        operator: what `W` and `U` are: `"conv"`, 3×3 convolutions; `"separable"`, 3×3 depthwise, 1×1 (small
            in Table 6); `"double-separable"`, 5×5 depthwise with two filters per channel, 1×1, 3×3 depthwise,
            1×1 (Mid).
        alpha: `α` in (0, 1], for all units or one each.
        learn_alpha: learn one `α` per unit.
        start: iterate from `"zero"` or from the `"input"`, the features.
        regulariser: `R` in the hidden objective, or None.
        gamma: weight `γ` of the regulariser.
        form: `"gradient"` or `"prox"`, see `Regularised`.
        activation, bias, max_norm, norm, weight_start: see `Unit`.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: for no units, an unknown operator, or numbers out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: Sequence[int] = (16, 32, 64, 128, 128),
        operator: str = "conv",
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        start: str = "zero",
        regulariser: Regulariser | None = None,
        gamma: float = 0.1,
        form: str = "gradient",
        activation: str | Activation = "relu",
        bias: bool = True,
        max_norm: float | None = 0.97,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        **methods: Any,
    ) -> None:
        state, weight = known("channels", channels), _weights(norm, weight_start, operator)
        injection = _weights(None, None, operator)
        units = [
            OptEqUnit(weight(state, n), injection(state, n), activation, bias, max_norm=max_norm)
            for n in hidden
        ]
        deep = DeepOptEq(units, alpha, learn_alpha, start)
        equilibrium_map = deep if regulariser is None else Regularised(deep, regulariser, gamma, form)
        super().__init__(equilibrium_map, **methods)


class Stack(nn.Sequential):
    """Bodies one after the other.

    Args:
        bodies: the first reads the features, each other one what the one before it gives.
    """

    def __init__(self, bodies: Sequence[nn.Module]) -> None:
        super().__init__(*bodies)


def _weights(
    norm: NormControl | None, start: Start | None, operator: str = "conv"
) -> Callable[[int, int], LinearOperator]:
    """What makes operators, from input to output channels, whose norm is kept in the way `norm`."""

    def separable(channels: int, hidden: int, size: int = 3, multiplier: int = 1) -> LinearOperator:
        return DepthwiseSeparableConv2d(channels, hidden, size, multiplier, norm, start)

    match operator:
        case "conv":
            return lambda channels, hidden: Conv2d(channels, hidden, 3, 1, norm, start)
        case "separable":
            return separable
        case "double-separable":
            return lambda channels, hidden: Compose(
                separable(channels, hidden, 5, 2), separable(hidden, hidden)
            )
    raise ConfigError(
        f"Expected `operator` to be one of conv, separable, double-separable, got {operator!r}."
    )


def _injection(channels: int, hidden: int, reduction: int) -> LinearOperator:
    convolution = Conv2d(channels, hidden, 3)
    return convolution if reduction == 1 else Compose(AveragePool(channels, reduction), convolution)


def _unit(
    channels: int,
    weight: Callable[[int, int], LinearOperator],
    activation: str | Activation,
    bias: bool,
    max_norm: float | None,
) -> Callable[[int, int], OptEqUnit]:
    def unit(hidden: int, reduction: int) -> OptEqUnit:
        W, U = weight(channels, hidden), _injection(channels, hidden, reduction)
        return OptEqUnit(W, U, activation, bias, max_norm=max_norm)

    return unit


def _single_or_parallel(
    make: Callable[[int, int], EquilibriumMap], hidden: int | Sequence[int], reductions: Sequence[int] | None
) -> EquilibriumMap:
    if isinstance(hidden, Sequence):
        return Parallel(_branches(make, hidden, reductions))
    if reductions is not None:
        raise ConfigError(f"`reductions` are those of branches; give `hidden` as a list, got {hidden}.")
    return make(hidden, 1)


def _branches(
    make: Callable[[int, int], M], hidden: Sequence[int], reductions: Sequence[int] | None
) -> list[M]:
    reductions = [1] * len(hidden) if reductions is None else reductions
    if len(hidden) != len(reductions) or not hidden:
        raise ConfigError(
            f"Expected one number of `hidden` channels and one of `reductions` per branch, got {len(hidden)}"
            f" and {len(reductions)}."
        )
    return [make(n, reduction) for n, reduction in zip(hidden, reductions, strict=True)]
