"""What deep OptEq optimises (Xie et al. 2022, §4)."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.errors import ConfigError, ShapeError
from opteq.maps.chain import ChainEquation
from opteq.maps.multiblock import MultiBlockEquation
from opteq.maps.skip import SkipEquation
from opteq.results import State, norm, squared_norm, tensors_of
from opteq.theory.envelope import Envelope, gradient_of_potential


def theorem2_residual(equation: ChainEquation | MultiBlockEquation, state: State) -> Tensor:
    """`(batch,)` relative norm of `∇Φ(z̃) + (I - P) z̃`, zero at an equilibrium (Xie et al. 2022, Theorem 2).

    `Φ(z̃) = Σ αM_{φ_i}^{1-α}(z_i)` and `(Pz̃)_i = z_{i-1}`. The gradients of the envelopes are computed from
    the units' energies, by Newton's method, and not from their maps, with which the residual would vanish
    for any map. At `α = 1` the inclusion `0 ∈ ∂φ_i(z_i) + z_i - z_{i-1}` says `z_i = ∇ψ_i(z_{i-1})`, and the
    difference of the two is taken. The norm is relative to that of `z̃`.

    Args:
        equation: of a `DeepOptEq` or of its `MultiBlockOptEq`.
        state: `z` of the deep model, or the blocks `z̃` of the multi-block form.

    Raises:
        ConfigError: for another equation, or if a unit is not proximal, as in a regularised model.
        ShapeError: if the state does not fit.
    """
    blocks = _blocks(equation, state)
    residuals = []
    for unit, block, before in zip(equation.units, blocks, (blocks[-1], *blocks[:-1]), strict=True):
        inner, alpha = _unit(unit)
        if alpha == 1:
            residuals.append(block - gradient_of_potential(inner.detach(), before))
        else:
            residuals.append(Envelope(inner, alpha).gradient(block) + block - before)
    return norm(tuple(residuals)) / norm(blocks).clamp(min=torch.finfo(blocks[0].dtype).tiny)


def corollary1_objective(equation: ChainEquation | MultiBlockEquation, blocks: State) -> Tensor:
    """`(batch,)` `αM_{φ_1}^{1-α}(z_1) + αM_{φ_2}^{1-α}(z_0) + ½‖z_1 - z_0‖²` at blocks `[z_1, z_0]`.

    Equilibria of two units minimise it (Xie et al. 2022, Corollary 1).

    Raises:
        ConfigError: for any number of units but two (three and more have no scalar objective), and for
            `α = 1`, where the envelopes are not finite everywhere.
    """
    checked = _blocks(equation, blocks)
    if len(checked) != 2:
        raise ConfigError(
            f"Corollary 1 is about two units, got {len(checked)}; three and more have no scalar"
            " objective, see theorem2_residual."
        )
    z_1, z_0 = checked
    total = 0.5 * squared_norm(z_1 - z_0)
    for unit, z in zip(equation.units, (z_1, z_0), strict=True):
        total = total + Envelope(*_unit(unit)).value(z)
    return total


def _blocks(equation: ChainEquation | MultiBlockEquation, state: State) -> tuple[Tensor, ...]:
    if not isinstance(equation, ChainEquation | MultiBlockEquation):
        raise ConfigError(
            f"Expected the equation of a DeepOptEq or MultiBlockOptEq, got a {type(equation).__name__}."
        )
    shape = tensors_of(equation.units[0].initial())[0].shape
    given = tensors_of(state)
    if isinstance(equation, ChainEquation) and isinstance(state, Tensor) and state.shape == shape:
        state = equation.detach().blocks(state.detach())
    blocks = tuple(t.detach() for t in tensors_of(state))
    if [b.shape for b in blocks] != [shape] * len(equation.units):
        raise ShapeError(
            f"Expected {len(equation.units)} blocks of shape {tuple(shape)}, or the state of the deep model,"
            f" got {', '.join(str(tuple(t.shape)) for t in given)}."
        )
    return blocks


def _unit(unit: object) -> tuple[Equation, float]:
    if not isinstance(unit, SkipEquation) or unit.structure != "proximal":
        raise ConfigError(
            f"Expected the units of a deep OptEq, got {type(unit).__name__}; Theorem 2 is about those."
        )
    return unit.inner, float(unit.alpha)
