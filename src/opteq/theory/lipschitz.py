"""Bounds on how much equilibria, and the networks around them, change with their input."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opteq.activations import ReLU
from opteq.errors import ConfigError, NonFiniteError
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap, Injection, state_shape
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import ADAPTIVE_NUMERATOR, GaussianMap
from opteq.maps.kernel import KernelMap
from opteq.maps.multibranch import MOptEq, MultiBranchEquation
from opteq.maps.optequnit import OptEqEquation, OptEqUnit
from opteq.maps.parallel import Parallel
from opteq.objectives.gaussian import GaussianSimilarity
from opteq.objectives.inner_product import InnerProductSimilarity
from opteq.objectives.patches import WholeSample
from opteq.operators.base import LinearOperator, sharp_norms
from opteq.operators.conv import circular_norm
from opteq.results import Certificate, State, map_state, tensors_of
from opteq.theory.bounds import published_lipschitz_geq, published_lipschitz_optequnit

CONCAVITY = 2 * math.exp(-1.5)
"""`A = e^{-u}(I - 2γrrᵀ)` with `u = γ‖r‖²` has no eigenvalue below minus this, reached at `u = 3/2`."""

# `max d^{3/2}e^{-γd} · ‖dγ/dc‖` in units of `‖W_h‖²`, with γ = 0.2/M.
_ADAPTIVE_PUSH = 2 * (1.5 / math.e) ** 1.5 / math.sqrt(ADAPTIVE_NUMERATOR)


@torch.no_grad()
def equilibrium_lipschitz(map: EquilibriumMap, x: Tensor) -> Certificate:
    """A Lipschitz constant of `x ↦ z*(x)`, in Euclidean norms, for inputs shaped like `x`.

    With `s = ‖W‖`, slopes `D` of the activation in `[0, L_σ]` and `c = U x + b`, differentiating the
    equilibrium gives

    - for `OptEqUnit`, `dz = B(μI - BᵀB)⁻¹D^½ dc` with `B = WᵀD^½`, `‖B‖² ≤ L_σs²`, hence
      `‖U‖ · L_σs / (μ - L_σs²)`. It is attained where every slope is `L_σ`, as by a ReLU whose units
      are all active, so that `s` and `‖U‖` alone allow no smaller one;
    - for `GaussianMap` with fixed `γ`, `dy = D^½(I + D^½WᵀAWD^½)⁻¹D^½WᵀA dc` with
      `-2e^{-3/2}I ⪯ A ⪯ I`, hence `‖U‖ · L_σs / (1 - 2e^{-3/2}L_σs²)`; patches put `‖W_h‖²` beside `s`
      and `s²`. Any admissible activation will do, where Li et al. 2023, Proposition 3, ask for a ReLU;
    - for `GaussianMap` with adaptive `γ`, which changes with `x`, `1 + 2√N (3/2e)^{3/2}/√0.2`, with `N` the
      number of patches, times as much. `γ = 0.2/M` has `‖dγ‖ ≤ 0.4M^{-3/2}‖W_h‖‖dc‖`, and the forces
      `e^{-γd}G r` change with `γ` at most by `d^{3/2}e^{-γd}‖W_h‖ ≤ (3/2eγ)^{3/2}‖W_h‖`: `γ` cancels;
    - for a `KernelMap` with `|k''|‖c‖²/n ≤ κ` for all inputs, as `normalise` ensures for the sigmoid and
      for degree 2, and `σ(0) = 0`,

          ‖U‖ · L_σ (a + κρ) / (1 - q),     q = L_σ(s² + κ),

      where `a` bounds `|k'|`, and `ρ` `‖y‖/‖c‖`. The Hessian `WᵀW + k''ccᵀ/n` in `y` is at most `q/L_σ` in
      norm, and the derivative of `k'(t)c` in `c` is `k'I + k''c(Ry)ᵀ/n`, with the reflection
      `R = I - 2ccᵀ/‖c‖²` where `n` grows with `‖c‖²` and `R = I` where `n = 1`: at most `a + κρ`. From
      `‖y‖ ≤ L_σ(s²‖y‖ + |k'|‖c‖)` follows `ρ = L_σ sup|k'|/(1 - L_σs²)`; or, since
      `|k'(t)| ≤ k'(0) + sup|k''||t|`, `ρ = L_σk'(0)/(1 - q)` and `a = k'(0) + κρ`, whichever are smaller. The
      linear kernel, with `κ = 0` and `a = 1`, needs no `σ(0) = 0`;
    - for `DeepOptEq`, whose map has constants `a` in `x` and `q` in `z`, `a / (1 - q)`;
    - for `Parallel`, the root of the sum of the squares of the branches' constants: all of them read `x`;
    - for `MOptEq`, with `r = max_i L_σ‖W_i‖²/μ_i`, `g = 1 + λ(C-1)` and `q = rg < 1`,

          √r p (1 + 2rλ(C-1)/(1 - q)) / (1 - q),     p² = Σ_i L_σ‖U_i‖²/μ_i.

      With `B = diag(μ_i^{-½}D_i^½W_i)`, `‖B‖² ≤ r`, and the width `t` of `D_τ` held, `dz = Bᵀv` with
      `(I - B ∂h Bᵀ)v = diag(μ_i^{-½}D_i^½) dc`. There `B ∂h Bᵀ ⪯ gBBᵀ ⪯ qI`, whence `√r p / (1 - q)`:
      attained by equal branches with heritage alone, all units active. But `t = τ·mean ‖z⁰_i‖²`,
      `z⁰ = T(0)`, moves with `x`, and `h` with it, at most by `λ(C-1)‖z‖·|dt|/t`, because of `|N_kl| ≤ t`
      where it does. With `|dt|/t ≤ 2‖dz⁰‖/‖z⁰‖`, `‖dz⁰‖ ≤ √r p‖dx‖` and `‖z‖ ≤ ‖z⁰‖/(1 - q)`, which is
      `distance_bound` of the equation at 0, both `t` and `τ` cancel. What is left enters as `dc` does,
      behind a `B`.

    Args:
        map: an `OptEqUnit`, `DeepOptEq`, `GaussianMap` or `KernelMap`, a `Parallel` of such, or an `MOptEq`
            of `OptEqUnit`s.
        x: a batch of inputs; only its shape matters.

    Raises:
        ConfigError: for other maps, norms too large for a bound, a `U` without a known Lipschitz constant, a
            kernel whose curvature inputs leave unbounded, or an `MOptEq` that jumps, with perturbations in
            force or branches coupled by the hard sign.
        NonFiniteError: for weights that are NaN or infinite.
    """
    expect_module(map)
    with sharp_norms(map):
        value = torch.tensor(_equilibrium_bound(map, _example(x)), dtype=torch.float64)
    return Certificate(value, "bound", ("Inputs are shaped like `x`.",))


def _equilibrium_bound(map: EquilibriumMap, x: Tensor) -> float:
    match map:
        case Parallel():
            return math.hypot(*(_equilibrium_bound(branch, x) for branch in map.maps))
        case MOptEq():
            return _coupled_bound(map, x)
        case OptEqUnit():
            push, pull = _unit_rates(map, x)
        case DeepOptEq():
            push, pull = _deep_rates(map, x)
        case GaussianMap():
            push, pull = _gaussian_rates(map, x)
        case KernelMap():
            push, pull = _kernel_rates(map, x)
        case _:
            raise ConfigError(f"No Lipschitz bound is known for {type(map).__name__}.")
    return push / _room(pull)


def _room(pull: float) -> float:
    if pull >= 1:
        raise ConfigError(
            f"No Lipschitz bound holds for weights this large: the bound {pull:.3f} on how the map changes"
            " with its state is not below 1; keep ‖W‖ smaller with `max_norm`."
        )
    return 1 - pull


def _unit_rates(unit: OptEqUnit, x: Tensor) -> tuple[float, float]:
    """Lipschitz constants of `T` in `x` and in `z`."""
    equation = unit.bind(x)
    shape = state_shape(equation.operator, equation.injection)
    s = equation.operator.norm_bound(shape, equation.weights).item()
    steepness = equation.activation.lipschitz * s / equation.mu
    return steepness * _bound(unit.injection.operator, x), steepness * s


def _coupled_bound(map: MOptEq, x: Tensor) -> float:
    if map.perturbing:
        raise ConfigError(
            "Perturbations follow signs, which jump: no Lipschitz bound holds; call eval() first, and leave"
            " out `perturb_at_inference`."
        )
    if map.coupling is None:
        return _equilibrium_bound(Parallel(map.units), x)
    if map.coupling.hard:
        raise ConfigError("With tau=0 the map jumps: no Lipschitz bound holds; give the coupling a `tau`.")
    equation = map.bind(x)
    if not isinstance(equation, MultiBranchEquation):
        raise ConfigError(
            "No Lipschitz bound is known for coupled kernel maps: the width of D_τ is that of the first W y,"
            " which may vanish where the later ones do not; couple OptEqUnits instead."
        )
    pull = equation.branches.contraction().value.max().item()
    room = _room(equation.uniqueness().value.max().item())
    push = math.hypot(
        *(
            math.sqrt(unit.activation.lipschitz / unit.mu) * _bound(unit.injection.operator, x)
            for unit in map.units
            if isinstance(unit, OptEqUnit)
        )
    )
    # What the width adds: nothing without a D_τ.
    drift = pull * (equation.coupling.gain - map.coupling.heritage) if equation.coupling.tensors else 0.0
    return math.sqrt(pull) * push * (1 + 2 * drift / room) / room


def _deep_rates(deep: DeepOptEq, x: Tensor) -> tuple[float, float]:
    push, pull = 0.0, 1.0
    for unit, skip in zip(deep.units, deep.skips, strict=True):
        alpha = float(skip())
        unit_push, unit_pull = _unit_rates(unit, x)
        step = alpha * unit_pull + 1 - alpha
        push, pull = step * push + alpha * unit_push, step * pull
    return push, pull


def _gaussian_rates(map: GaussianMap, x: Tensor) -> tuple[float, float]:
    equation = map.bind(x)
    similarity = equation.similarity
    assert isinstance(similarity, GaussianSimilarity)
    s = similarity.operator.norm_bound(similarity.shape, similarity.weights).item()
    curvature = equation.contraction().value.max().item()  # L_σ s² ‖W_h‖²
    push = curvature / s * _bound(map.injection.operator, x) if s else 0.0
    if map.gamma == "adaptive":
        patches = similarity.split(similarity.injection).shape[1]
        push *= 1 + math.sqrt(patches) * _ADAPTIVE_PUSH
    return push, CONCAVITY * curvature


def _kernel_rates(map: KernelMap, x: Tensor) -> tuple[float, float]:
    similarity, slope, kernel = map.bind(x).similarity, map.activation.lipschitz, map.kernel
    assert isinstance(similarity, InnerProductSimilarity)
    pull = slope * similarity.norm_bound().value.item() ** 2
    curvature = map.curvature_bound(map.max_norm or math.inf)
    steepest = kernel.largest_slope
    if curvature:
        zero = torch.zeros((), dtype=torch.float64)
        if map.activation(zero):
            raise ConfigError(
                f"No Lipschitz bound is known for {kernel} with an activation that is not 0 at 0, such as"
                f" {map.activation}; use relu or tanh."
            )
        if math.isinf(curvature):
            raise ConfigError(
                f"No Lipschitz bound holds for {kernel} here: its curvature grows with the input; use"
                " `normalise`, a `max_norm` and a kernel of bounded curvature."
            )
        first = kernel.slope(zero).abs().item()
        length = slope * steepest / _room(pull)
        pull += slope * curvature
        length = min(length, slope * first / _room(pull))
        steepest = min(steepest, first + curvature * length) + curvature * length
    return slope * steepest * _bound(map.injection.operator, x), pull


@torch.no_grad()
def published_lipschitz(layer: EquilibriumLayer, x: Tensor) -> Certificate:
    """Li et al. 2023, Proposition 3, as printed, with its quantities measured on a batch.

    `opteq.theory.bounds.published_lipschitz_geq` or `…_optequnit` with `μ` the larger of the bounds on `‖U‖`
    and `‖W‖`, `β_max` and `B` the largest over the batch. The proposition bounds the change of `y`; for an
    `OptEqUnit`, which gives `z = Wᵀy/μ`, the bound is carried over with the norm of `W`. Compare with
    `equilibrium_lipschitz`, which needs no measured quantity.

    Args:
        layer: of an `OptEqUnit` with `mu=1`, or of a `GaussianMap` without patches and bias, with fixed
            `γ`; with ReLU.
        x: a batch of inputs, `(batch, ...)`.

    Raises:
        ConfigError: if the proposition does not apply; the message says why.
    """
    match layer.map:
        case OptEqUnit(mu=1.0, activation=ReLU()) as map:
            pass
        case GaussianMap(patches=WholeSample(), gamma=float() | int(), activation=ReLU()) as map:
            if map.injection.bias is not None:
                raise ConfigError("Proposition 3 presumes that there is no bias; use bias=False.")
        case map:
            raise ConfigError(
                "Proposition 3 is about an OptEqUnit with mu=1 or a GaussianMap without patches, with fixed"
                f" `gamma`, both with ReLU; got {map}. Use `equilibrium_lipschitz`."
            )
    with sharp_norms(map):
        equation = map.bind(x)
        y = layer(x)
        assert isinstance(y, Tensor)
        if isinstance(equation, OptEqEquation):
            shape = state_shape(equation.operator, equation.injection)
            s = equation.operator.norm_bound(shape, equation.weights).item()
            bound = published_lipschitz_optequnit(max(s, _bound(map.injection.operator, x)))
            return Certificate(s * bound.value, bound.kind, bound.assumptions)
        similarity = equation.similarity
        assert isinstance(similarity, GaussianSimilarity)
        s = similarity.operator.norm_bound(similarity.shape, similarity.weights).item()
        return published_lipschitz_geq(
            similarity.attention(y).max().item(),
            max(s, _bound(map.injection.operator, x)),
            similarity.gamma.max().item(),
            max(t.flatten(1).norm(dim=1).max().item() for t in (x, y)),
        )


@torch.no_grad()
def lipschitz_bound(module: nn.Module, x: Tensor) -> Certificate:
    """A Lipschitz constant of a network in Euclidean norms: the product over its stages.

    Covers opteq's operators and equilibrium layers, linear and convolutional layers, batch norm and
    dropout in eval mode, average and max pooling, the usual 1-Lipschitz activations, `nn.Sequential` of
    these, modules that list such stages as `stages`, and modules with a constant of their own, a method
    `lipschitz(x)` for inputs shaped like `x`, which subclasses need that compute something else than their
    base class. What passes between the stages may be a tuple of tensors, one for each branch, whose norm is
    that of all of them joined. `EquilibriumClassifier` and `BranchClassifier` are such networks. The
    constants of layers are those of exact equilibria.

    Args:
        module: the network, in eval mode.
        x: a batch of inputs; only its shape matters.

    Raises:
        ConfigError: for a part that has no known constant; the message names it.
        NonFiniteError: for weights that are NaN or infinite.
    """
    expect_module(module)
    value = torch.tensor(_bound(module, _example(x)), dtype=torch.float64)
    return Certificate(value, "bound", ("Inputs are shaped like `x`.",))


def expect_module(module: object) -> None:
    """Raise a `ConfigError` unless `module` is a module, a `NonFiniteError` unless its weights are finite."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"Expected a torch module, got {type(module).__name__}.")
    if not all(bool(p.isfinite().all()) for p in module.parameters()):
        raise NonFiniteError(
            f"Weights of {type(module).__name__} are NaN or infinite, as when a training diverges; lower the"
            " learning rate or go back to an earlier checkpoint."
        )


def stages_of(module: nn.Module) -> list[nn.Module]:
    """The modules that `module` applies one after the other, nested sequences unfolded."""
    # A subclass with a `forward` of its own may do anything with its parts.
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    stages = module if plain else getattr(module, "stages", None)
    if not isinstance(stages, Iterable):
        return [module]
    return [part for stage in stages for part in stages_of(stage)]


def check_stages(module: nn.Module, x: State, after: State) -> None:
    """Raise a `ConfigError` if a module that lists its `stages` gives something else than these, `after`."""
    if not any(hasattr(part, "stages") for part in module.modules()):
        return
    given, listed = tensors_of(module(x)), tensors_of(after)
    if len(given) != len(listed) or not all(map(_alike, given, listed)):
        raise ConfigError(
            f"{type(module).__name__} gives something else than its `stages` do one after the other; let"
            " `stages` list all that it applies, or give the list another name."
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def _example(x: State) -> Any:
    """One input like those of `x`, of which there may be none."""
    return map_state(lambda t: t[:1] if len(t) else t.new_zeros(1, *t.shape[1:]), x)


def _bound(module: nn.Module, x: Any) -> float:
    value, first = 1.0, x
    for stage in stages_of(module):
        value *= _stage_bound(stage, x)
        x = stage(x)
    check_stages(module, first, x)
    return value


def _stage_bound(stage: nn.Module, x: Tensor) -> float:
    # What a subclass does in a `forward` of its own, only its `lipschitz` can know.
    if not getattr(stage.forward, "__module__", "").startswith(("torch.nn.", "opteq.")):
        return _own_bound(stage, x)
    match stage:
        case EquilibriumLayer():
            return equilibrium_lipschitz(stage.map, x).value.item()
        case LinearOperator():
            return stage.norm_bound(tuple(x.shape[1:])).item()
        case Injection(operator=operator):
            return _bound(operator, x)
        case nn.Linear():
            return torch.linalg.matrix_norm(stage.weight.double(), 2).item() * (1 + 1e-12)
        case nn.Conv2d(padding_mode="zeros", dilation=(1, 1)):
            return circular_norm(stage.weight, stage.groups, tuple(x.shape[2:])).item()
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.Dropout() | nn.Dropout2d() if stage.training:
            raise ConfigError(f"{stage} has a Lipschitz constant in eval mode only; call eval() first.")
        case nn.BatchNorm1d() | nn.BatchNorm2d() if stage.running_var is not None:
            scale = (stage.running_var.double() + stage.eps).rsqrt()
            weight = torch.ones_like(scale) if stage.weight is None else stage.weight.double()
            return (weight * scale).abs().max().item()
        case nn.AvgPool2d(count_include_pad=True) | nn.AdaptiveAvgPool2d():
            return _averaging_norm(stage, x)
        case nn.MaxPool2d(dilation=1 | (1, 1), return_indices=False):
            return _maximum_norm(stage)
        case nn.Identity() | nn.Flatten() | nn.ZeroPad2d() | nn.Dropout() | nn.Dropout2d():
            return 1.0
        case nn.ReLU() | nn.Tanh() | nn.Sigmoid() | nn.Hardtanh() | nn.Softplus() | nn.Softshrink():
            return 1.0
        case nn.LeakyReLU(negative_slope=slope) | nn.ELU(alpha=slope) if 0 <= slope <= 1:
            return 1.0
        case _:
            return _own_bound(stage, x)


def _own_bound(stage: nn.Module, x: Tensor) -> float:
    own: Any = getattr(stage, "lipschitz", None)
    if own is None:
        raise ConfigError(
            f"No Lipschitz constant is known for {type(stage).__name__}; give it a method `lipschitz(x)` that"
            " returns one. The documentation of opteq.lipschitz_bound says what is known."
        )
    return own(x)


def _maximum_norm(pool: nn.MaxPool2d) -> float:
    """`√m` if no pixel lies in more than `m` windows: `|max a - max b| ≤ ‖a - b‖` for each of them."""
    sizes, strides = (t if isinstance(t, tuple) else (t, t) for t in (pool.kernel_size, pool.stride))
    return math.sqrt(math.prod(-(-k // s) for k, s in zip(sizes, strides, strict=True)))


def _averaging_norm(pool: nn.Module, x: Tensor) -> float:
    """The Schur test: a matrix of numbers `≥ 0` has a norm of at most √(row sum · column sum)."""
    with torch.enable_grad():
        ones = torch.ones(1, 1, *x.shape[2:], dtype=torch.float64, device=x.device, requires_grad=True)
        rows = pool(ones)
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    return math.sqrt(rows.max().item() * columns.max().item()) * (1 + 1e-12)
