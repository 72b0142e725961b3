"""Bodies: equilibria of maps made of 3×3 convolutions, between the stem and the head of a classifier.

Each has as many channels as the features it reads, unless it says otherwise. Those with `hidden` channels as
one number have a state of one tensor; with a list, one number per branch, they have a tuple of tensors. Other
maps and operators make a body with `Equilibrium` or `opteq.EquilibriumLayer`, explicit networks are bodies as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from opteq.activations import Activation
from opteq.errors import ConfigError
from opteq.gradients.base import DirectMethod, GradientMethod
from opteq.gradients.implicit import Implicit
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import GaussianMap
from opteq.maps.hidden import HiddenReadout
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
from opteq.options import check_choice
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Solver

Make = Callable[[int, int], LinearOperator]
"""Makes an operator from input and output channels."""


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


class Convolutional(Equilibrium):
    """Equilibria of maps of convolutions: of one map, or of several that are joined to one.

    Args:
        make: gives a map from the channels of its state, its hidden channels, what makes its `W` and its `U`
            from input and output channels, and `activation`, `bias` and `max_norm`.
        join: makes one map of those of a list.
        channels: channels of every state.
        hidden: hidden channels of the map; a list has one number per map.
        reductions: by what the size of each state is smaller than that of the features, which `U` averages
            before its convolution; 1 unless given.
        operator: what `W` and `U` are: `"conv"`, 3×3 convolutions; `"separable"`, 3×3 depthwise, 1×1;
            `"double-separable"`, 5×5 depthwise with two filters per channel, 1×1, 3×3 depthwise, 1×1.
        activation: name of an activation in `opteq.activations`, or an object.
        bias: whether the injections have a bias.
        max_norm: ceiling `ζ` on every `‖W‖₂`, or None.
        norm: the way that it is kept; `Ceiling()` unless given.
        weight_start: the initial values of `W`; `UniformStart()` unless given.
        readout: `"state"`, or of OptEq units `"hidden"`, their hidden variables `y* = σ(W z* + …)`, of
            `hidden` channels, see `HiddenReadout`.
        methods: `solver` and `gradient`, see `Equilibrium`.

    Raises:
        ConfigError: if `hidden` and `reductions` differ in length, for an unknown operator or readout, or
            numbers out of range.
    """

    def __init__(
        self,
        make: Callable[..., EquilibriumMap],
        join: Callable[[list[Any]], EquilibriumMap],
        channels: int | None,
        hidden: int | Sequence[int],
        reductions: Sequence[int] | None = None,
        operator: str = "conv",
        activation: str | Activation = "relu",
        bias: bool = False,
        max_norm: float | None = 0.97,
        norm: NormControl | None = None,
        weight_start: Start | None = None,
        readout: str = "state",
        **methods: Any,
    ) -> None:
        check_choice("readout", readout, ("state", "hidden"))
        state = known("channels", channels)

        def made(n: int, reduction: int) -> EquilibriumMap:
            def weight(inputs: int, outputs: int) -> LinearOperator:
                return _convolution(operator, inputs, outputs, norm, weight_start)

            def injection(inputs: int, outputs: int) -> LinearOperator:
                convolution = _convolution(operator, inputs, outputs)
                return convolution if reduction == 1 else Compose(AveragePool(inputs, reduction), convolution)

            return make(state, n, weight, injection, activation=activation, bias=bias, max_norm=max_norm)

        if isinstance(hidden, Sequence):
            reductions = [1] * len(hidden) if reductions is None else reductions
            if not isinstance(reductions, Sequence) or len(hidden) != len(reductions):
                raise ConfigError(
                    "Expected one number of `hidden` channels and one of `reductions` per branch, got"
                    f" {list(hidden)} and {reductions!r}."
                )
            equilibrium_map = join([made(*pair) for pair in zip(hidden, reductions, strict=True)])
        elif reductions is not None:
            raise ConfigError(f"`reductions` are those of branches; give `hidden` as a list, got {hidden}.")
        else:
            equilibrium_map = made(hidden, 1)
        super().__init__(
            HiddenReadout(equilibrium_map) if readout == "hidden" else equilibrium_map, **methods
        )

    @staticmethod
    def hidden_channels(hidden: int | Sequence[int]) -> int | None:
        """Channels of the hidden variables for these `hidden`; None where those of branches differ."""
        different = {hidden} if isinstance(hidden, int) else set(hidden)
        return different.pop() if len(different) == 1 else None


class Unit(Convolutional):
    """The OptEq unit `z = Wᵀσ(W z + U g(x) + b)`, or several in parallel (POptEq, Li et al. 2022, §A.1).

    Args:
        channels: channels of every state `z`.
        hidden: channels of `W z`; a list has one number per branch.
        bias: whether there is a `b`.
        options: the other options of `Convolutional`.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        *,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(_unit, Parallel, channels, hidden, bias=bias, **options)


class Coupled(Convolutional):
    """OptEq units that are coupled by heritage and diversity (MOptEq, Li et al. 2022).

    A contraction needs `‖W_i‖² L_σ (1 + λ(C-1)) < 1`, which the default `max_norm` ensures for `λ = 0.01` and
    32 channels. With a polynomial or sigmoid `kernel` (Li et al. 2023, Table 5) the branches are kernel maps,
    see `KernelMOptEq`; with `ζ` for `max_norm` the condition is `½ζ² L_σ (1 + λ(C-1) + 1) < 1`.

    Args:
        channels: channels `C` of every state `z_i`.
        hidden: channels of `W_i z_i`, one number per branch.
        coupling: heritage and diversity; `HeritageDiversity()`, which has `λ = 0.01`, unless given.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        perturbation: size `ε` of the perturbations that strengthen the training, 0 for none.
        sweep: `"jacobi"` or `"gauss-seidel"`, see `CoupledMap`.
        max_norm: ceiling on every `‖W_i‖₂`, or None; for kernel maps their `ζ`.
        options: the other options of `Convolutional`.

    Raises:
        ConfigError: for a single branch or an unknown kernel, and see `Convolutional`.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: Sequence[int] = (64, 128, 128),
        *,
        coupling: HeritageDiversity | None = None,
        kernel: str = "linear",
        perturbation: float = 0.1,
        sweep: str = "jacobi",
        max_norm: float | None = 0.85,
        **options: Any,
    ) -> None:
        def kernel_map(state: int, n: int, W: Make, U: Make, **common: Any) -> KernelMap:
            # Here `W y` is the state that is coupled.
            return KernelMap(W(n, state), U(state, n), kernel, **common)

        coupling = HeritageDiversity() if coupling is None else coupling
        make, kind = (_unit, MOptEq) if kernel == "linear" else (kernel_map, KernelMOptEq)

        def join(units: list[Any]) -> EquilibriumMap:
            return kind(units, coupling, sweep, perturbation)

        super().__init__(make, join, channels, _listed(hidden), max_norm=max_norm, **options)


class Gaussian(Convolutional):
    """A Gaussian kernel map with patches (GEQ, Li et al. 2023; KerDEQ with `gamma=0.5`), or parallel ones.

    Args:
        channels: channels of every state `y`.
        hidden: channels of `W y`, split into patches; a list has one number per branch.
        patch_channels: channels in a patch.
        patch_size: height and width of a patch, which must divide those of every branch; None for the plain
            kernel on whole samples.
        patch_hidden: columns of the patch projections `W_h`.
        gamma: a positive number, `"adaptive"` or `"mean"`, see `GaussianMap`.
        options: the other options of `Convolutional`.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        *,
        patch_channels: int = 8,
        patch_size: int | None = 2,
        patch_hidden: int = 64,
        gamma: float | str = "adaptive",
        **options: Any,
    ) -> None:
        patches = None if patch_size is None else Patches(patch_channels, patch_size)

        def kernel_map(state: int, n: int, W: Make, U: Make, **common: Any) -> GaussianMap:
            return GaussianMap(W(state, n), U(state, n), patches, patch_hidden, gamma, **common)

        super().__init__(kernel_map, Parallel, channels, hidden, **options)


class Kernel(Convolutional):
    """A map with a kernel of an inner product (Li et al. 2023, Table 5), or parallel ones.

    Args:
        channels: channels of every state `y`.
        hidden: channels of `W y`; a list has one number per branch.
        kernel: `"linear"`, `"polynomial"` or `"sigmoid"`.
        options: the other options of `Convolutional`; `max_norm` is the `ζ` of `KernelMap`.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: int | Sequence[int] = 64,
        *,
        kernel: str = "sigmoid",
        **options: Any,
    ) -> None:
        def kernel_map(state: int, n: int, W: Make, U: Make, **common: Any) -> KernelMap:
            return KernelMap(W(state, n), U(state, state), kernel, **common)

        super().__init__(kernel_map, Parallel, channels, hidden, **options)


class Deep(Convolutional):
    """A deep OptEq, its units one after the other (Xie et al. 2022, §7).

    The training modes of Algorithm 1 are values of `gradient`: `Implicit()`, `Unrolled(20)`, and
    `Unrolled(20, select=SAM(...))`, which is R†; `regulariser` is R*. In Table 6 the operators of OptEq-small
    are `"separable"`, those of OptEq-Mid `"double-separable"`.

    Args:
        channels: channels of the state.
        hidden: hidden channels of the units, first to last.
        alpha: `α` in (0, 1], for all units or one each.
        learn_alpha: learn one `α` per unit.
        start: iterate from `"zero"` or from the `"input"`, the features.
        regulariser: `R` in the hidden objective, or None.
        gamma: weight `γ` of the regulariser.
        form: `"gradient"` or `"prox"`, see `Regularised`.
        bias: whether the units have a bias.
        options: the other options of `Convolutional`, but for reductions.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: Sequence[int] = (16, 32, 64, 128, 128),
        *,
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        start: str = "zero",
        regulariser: Regulariser | None = None,
        gamma: float = 0.1,
        form: str = "gradient",
        bias: bool = True,
        **options: Any,
    ) -> None:
        def join(units: list[Any]) -> EquilibriumMap:
            deep = DeepOptEq(units, alpha, learn_alpha, start)
            return deep if regulariser is None else Regularised(deep, regulariser, gamma, form)

        super().__init__(_unit, join, channels, _listed(hidden), reductions=None, bias=bias, **options)

    @staticmethod
    def hidden_channels(hidden: int | Sequence[int]) -> int | None:
        """Those of the last unit."""
        return _listed(hidden)[-1] if hidden else None


class Stack(nn.Sequential):
    """Modules one after the other, in a list as configurations have it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(*modules)


class Product(Compose):
    """Operators applied from first to last, in a list as configurations have it."""

    def __init__(self, operators: Sequence[LinearOperator]) -> None:
        super().__init__(*operators)


def _listed(hidden: int | Sequence[int]) -> Sequence[int]:
    return [hidden] if isinstance(hidden, int) else hidden


def _unit(state: int, n: int, W: Make, U: Make, **common: Any) -> OptEqUnit:
    return OptEqUnit(W(state, n), U(state, n), **common)


def _convolution(
    operator: str, inputs: int, outputs: int, norm: NormControl | None = None, start: Start | None = None
) -> LinearOperator:
    check_choice("operator", operator, ("conv", "separable", "double-separable"))
    if operator == "conv":
        return Conv2d(inputs, outputs, 3, 1, norm, start)
    if operator == "separable":
        return DepthwiseSeparableConv2d(inputs, outputs, 3, 1, norm, start)
    wide = DepthwiseSeparableConv2d(inputs, outputs, 5, 2, norm, start)
    return Compose(wide, DepthwiseSeparableConv2d(outputs, outputs, 3, 1, norm, start))
