"""Perturbations of the features that enter a layer, and what they do to its hidden objective."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.base import LinearOperator
from opteq.results import map_state
from opteq.theory.arguments import expect_layer, expect_size


def reconstructed(layer: EquilibriumLayer, x: Tensor, size: float) -> Tensor:
    """`δ` with `‖δ‖_∞ ≤ ε` for which `x - δ` raises the hidden objective most, to first order.

    `δ = -ε sign ∇_x G(z*; x)`. An OptEq unit has `∇_x G = -Uᵀy*`, hence `δ = ε sign(Uᵀy*)` (Li et al. 2022,
    §2.2); branches on one `x` have `-Σ_i U_iᵀy_i*`.

    Args:
        layer: a layer whose map has a scalar objective.
        x: `(batch, ...)` features that enter the layer.
        size: `ε`.

    Raises:
        ConfigError: for something else than a layer, a map without a scalar objective, or a negative size.
    """
    expect_size(size)
    return -size * _objective_gradient(layer, x).sign()


def uniform(x: Tensor, size: float, generator: torch.Generator | None = None) -> Tensor:
    """`δ` shaped like `x` with independent entries from `[-ε, ε]`."""
    expect_size(size)
    return size * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) - 1)


def binomial(x: Tensor, size: float, generator: torch.Generator | None = None) -> Tensor:
    """`δ` shaped like `x` with independent entries `±ε`, either with probability ½."""
    expect_size(size)
    return size * (2 * torch.randint(2, x.shape, generator=generator, device=x.device) - 1).to(x.dtype)


def reconstruction_bound(layer: EquilibriumLayer, x: Tensor, size: float) -> Tensor:
    """`(batch,)` what the reconstructed perturbation does at least (Li et al. 2022, Proposition 2).

    With `N` numbers in each `x`, equilibria `z*` for `x` and `z'` for `x - δ`, and `‖W‖, ‖U‖ ≤ 1`,

        max{G(z'; x - δ) - G(z*; x), √N ε ‖z' - z*‖} ≥ ½(ε‖Uᵀy*‖₁ - Nε²).

    Args:
        layer: a layer with an `OptEqUnit` of `μ = 1`.
        x: `(batch, ...)` features that enter the layer.
        size: `ε`.

    Raises:
        ConfigError: for something else than a layer, another map, norms above 1, or a negative size.
    """
    expect_layer(layer)
    expect_size(size)
    unit = layer.map
    if not isinstance(unit, OptEqUnit) or unit.mu != 1:
        raise ConfigError(f"Proposition 2 is about an OptEqUnit with mu=1, got {unit}.")
    gradient = _objective_gradient(layer, x).flatten(1)
    U = unit.injection.operator
    if not isinstance(U, LinearOperator):
        raise ConfigError(f"Proposition 2 needs an opteq operator as `U`, to know its norm, got {U}.")
    state_shape = tuple(unit.bind(x).initial().shape[1:])
    norms = {
        "W": unit.W.norm(state_shape, unit.max_norm).item(),
        "U": U.norm(tuple(x.shape[1:])).item(),
    }
    for name, norm in norms.items():
        if norm > 1 + 1e-6:
            raise ConfigError(f"Proposition 2 asks for ‖{name}‖ ≤ 1, got {norm:.4g}; scale `{name}` down.")
    return 0.5 * size * (gradient.abs().sum(1) - size * gradient.shape[1])


def _objective_gradient(layer: EquilibriumLayer, x: Tensor) -> Tensor:
    """`∇_x G(z*; x)`; the change of `z*` with `x` does not enter, since `z*` is stationary."""
    expect_layer(layer)
    with torch.no_grad():
        z = map_state(Tensor.detach, layer(x))
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        equation = layer.bind(x)
        if equation.objective is None:
            raise ConfigError(f"{type(layer.map).__name__} has no scalar objective to raise.")
        return torch.autograd.grad(equation.objective(z).sum(), x)[0]
