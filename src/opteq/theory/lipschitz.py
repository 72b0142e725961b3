"""Bounds on how much equilibria, and the networks around them, change with their input."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from opteq.activations import ReLU
from opteq.errors import ConfigError, NonFiniteError
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap, Injection, expect_map
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqEquation, OptEqUnit
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from opteq.objectives.patches import WholeSample
from opteq.operators.base import LinearOperator
from opteq.operators.conv import circular_norm
from opteq.overrides import definer, known_class, overridden
from opteq.results import Certificate, State, tensors_of
from opteq.theory.arguments import example_of, expect_layer
from opteq.theory.bounds import published_lipschitz_geq, published_lipschitz_optequnit
from opteq.theory.claims import LIPSCHITZ, expect_own_claims

# What an operator of one's own may override: the map that it then binds is asked for its norm.
_OF_OPERATORS = ("act", "kept_norm", "weight_count", "weights", "sides")


@torch.no_grad()
def equilibrium_lipschitz(map: EquilibriumMap, x: State) -> Certificate:
    """A Lipschitz constant of `x ↦ z*(x)`, in Euclidean norms, for inputs shaped like `x`.

    The equation knows how its equilibrium follows its injections, `Equation.equilibrium_lipschitz`, and the
    map which modules these come from, whose constants are those of `lipschitz_bound`. The derivations are
    with the
    equations: `a/(1 - q)` for units, chains of them, and what wraps them, `SimilarityEquation` with
    `GaussianSimilarity.rates` and `InnerProductSimilarity.rates` for kernels, `MultiBranchEquation` for
    coupled branches; independent branches have the root of the sum of squares, since all of them read `x`.

    Args:
        map: an equilibrium map.
        x: a batch of inputs; only its shape matters.

    Raises:
        ConfigError: for something else than a map, and where no bound is known: other maps, norms too large,
            a `U` without a known Lipschitz constant, a kernel whose curvature inputs leave unbounded,
            perturbations in force, branches coupled by the hard sign, hooks, or a subclass, of the map or of
            a part, that overrides what is computed without stating anew what is known of it.
        NonFiniteError: for weights that are NaN or infinite.
        ShapeError: if `x` is no batch of tensors that fit.
    """
    expect_map(map)
    expect_module(map)
    expect_settled(map)
    example = example_of(x, map)
    pushes = [_bound(operator, example) for operator in _injections(map)]
    equation = map.bind(example)
    expect_own_claims(equation, LIPSCHITZ)
    value = _finite(equation.equilibrium_lipschitz(iter(pushes)), map)
    return Certificate(torch.tensor(value, dtype=torch.float64), "bound", ("Inputs are shaped like `x`.",))


def _injections(map: EquilibriumMap) -> tuple[nn.Module, ...]:
    """What reads the input of a map, as said by the class that binds it, and by no base of that."""
    for part in map.modules():
        if isinstance(part, EquilibriumMap):
            says = definer(type(part), "injections")
            # What says nothing answers for itself, below.
            changed = None if says is EquilibriumMap else overridden(part, says)
            if changed:
                raise ConfigError(
                    f"{type(part).__name__} overrides `{changed}`, so that the bound of {says.__name__} need"
                    " not hold for it; give it `injections` of its own, the modules that read `x`."
                )
    return map.injections


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
        ConfigError: for something else than a layer, or if the proposition does not apply; the message says
            why.
    """
    expect_layer(layer)
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
    expect_settled(map)
    y, equation = layer(x), map.bind(x)
    expect_own_claims(equation, LIPSCHITZ)
    assert isinstance(y, Tensor)
    largest_u = max(_bound(operator, x) for operator in _injections(map))
    if isinstance(equation, OptEqEquation):
        s = equation.W.norm_bound().item()
        bound = published_lipschitz_optequnit(max(s, largest_u))
        return Certificate(s * bound.value, bound.kind, bound.assumptions)
    similarity = equation.similarity
    assert isinstance(similarity, GaussianSimilarity)
    return published_lipschitz_geq(
        similarity.attention(y).max().item(),
        max(similarity.W.norm_bound().item(), largest_u),
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
    that of all of them joined. An `ImageClassifier` is such a network. The constants of layers are those of
    exact equilibria.

    Args:
        module: the network, in eval mode.
        x: a batch of inputs; only its shape matters.

    Raises:
        ConfigError: for a part that has no known constant; the message names it.
        NonFiniteError: for weights that are NaN or infinite.
        ShapeError: if `x` is no batch of tensors.
    """
    expect_module(module)
    expect_settled(module)
    value = _finite(_bound(module, example_of(x, module)), module)
    return Certificate(torch.tensor(value, dtype=torch.float64), "bound", ("Inputs are shaped like `x`.",))


def expect_module(module: object) -> None:
    """Raise a `ConfigError` unless `module` is a module, a `NonFiniteError` unless its weights are finite."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"Expected a torch module, got {type(module).__name__}.")
    if not all(bool(p.isfinite().all()) for p in module.parameters()):
        raise _not_finite(module)


def _finite(value: float, module: nn.Module) -> float:
    """`value`, unless it is NaN, as behind a running variance that is."""
    if math.isnan(value):
        raise _not_finite(module)
    return value


def _not_finite(module: nn.Module) -> NonFiniteError:
    return NonFiniteError(
        f"Weights of {type(module).__name__} are NaN or infinite, as when a training diverges; lower the"
        " learning rate or go back to an earlier checkpoint."
    )


def stages_of(module: nn.Module) -> list[nn.Module]:
    """The modules that `module` applies one after the other, nested sequences unfolded.

    Raises:
        ConfigError: for a class that inherits its `stages` and overrides what is done with them.
    """
    stages = module if applies(module, nn.Sequential) else getattr(module, "stages", None)
    if not isinstance(stages, Iterable):
        return [module]
    if hasattr(type(module), "stages"):
        says = definer(type(module), "stages")
        if changed := overridden(module, says):
            raise ConfigError(
                f"{type(module).__name__} overrides `{changed}`, so that the `stages` of {says.__name__} need"
                " not be all that it applies; give it `stages` of its own."
            )
    return [part for stage in stages for part in stages_of(stage)]


def applies(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what those of a class of opteq or `torch.nn` do, with its own weights.

    A subclass that overrides `forward`, or what that calls, may do anything with its parts.
    """
    free = _OF_OPERATORS if isinstance(module, LinearOperator) else ()
    return isinstance(module, kind) and not overridden(module, known_class(module), free)


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


def _bound(module: nn.Module, x: Any) -> float:
    value, first = 1.0, x
    for stage in stages_of(module):
        value *= _stage_bound(stage, x)
        x = stage(x)
    check_stages(module, first, x)
    return value


def expect_settled(module: nn.Module) -> None:
    """Raise a `ConfigError` if hooks may change what a part of `module` computes, or its weights still move.

    The pre-hooks of torch that set the weights of opteq's operators, those of pruning and of the older
    `weight_norm` and `spectral_norm`, are run when these are bound. They cannot change an input.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ConfigError("Hooks for all modules may change what each computes: no bound holds; remove them.")
    for name, part in module.named_modules():
        setters = [hook for hook in part._forward_pre_hooks.values() if _sets_weights(part, hook)]
        if part._forward_hooks or len(setters) < len(part._forward_pre_hooks):
            raise ConfigError(
                f"{name or type(part).__name__} has a forward hook, which may change what it computes: no"
                " bound holds; remove the hook, as `torch.nn.utils.remove_weight_norm` does its own."
            )
        if part.training and (setters or parametrize.is_parametrized(part)):
            raise ConfigError(
                f"The weights of {name or type(part).__name__} are computed anew at each use, and may change"
                " then in training mode, as under spectral_norm; call eval() first."
            )


def _sets_weights(part: nn.Module, hook: object) -> bool:
    """Whether it is a pre-hook of torch's on an operator; of pruning also by a mask of one's own."""
    by_torch = getattr(type(hook).__call__, "__module__", "").startswith("torch.nn.utils.")
    return isinstance(part, LinearOperator) and by_torch


def _stage_bound(stage: nn.Module, x: Tensor) -> float:
    # What a subclass computes in its own way only its `lipschitz` can know; products apply their factors.
    factors = [part for part in stage.modules() if isinstance(part, LinearOperator)]
    parts = factors if isinstance(stage, LinearOperator) else [stage]
    if not all(applies(part, nn.Module) for part in parts):
        return _own_bound(stage, x)
    match stage:
        case EquilibriumLayer():
            return equilibrium_lipschitz(stage.map, x).value.item()
        case LinearOperator():
            stage.check_input(x)
            operator = stage.bind(tuple(x.shape[1:]))
            expect_own_claims(operator)
            return operator.norm_bound().item()
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
        case nn.ReLU() | nn.Tanh() | nn.Sigmoid() | nn.Hardtanh() | nn.Softshrink():
            return 1.0
        # Above the threshold it goes on as the identity, with a jump there by e^{-threshold}.
        case nn.Softplus(threshold=threshold) if threshold >= 20:
            return 1.0
        case nn.LeakyReLU(negative_slope=slope) | nn.ELU(alpha=slope) if 0 <= slope <= 1:
            return 1.0
        case _:
            return _own_bound(stage, x)


def _own_bound(stage: nn.Module, x: Tensor) -> float:
    own: Any = getattr(stage, "lipschitz", None)
    inherited = hasattr(type(stage), "lipschitz") and overridden(stage, definer(type(stage), "lipschitz"))
    if own is None or inherited:
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
