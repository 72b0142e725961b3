"""Whether the bounds that equations and their parts state hold for those of other people's classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from opteq.activations import Activation
from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.maps.hiddenvariable import HiddenReadoutEquation, HiddenVariable
from opteq.objectives.coupling import Coupling, HeritageDiversity
from opteq.objectives.inner_product import InnerProductKernel
from opteq.objectives.patches import Patches, WholeSample
from opteq.objectives.regularisers import Regulariser
from opteq.objectives.similarity import Similarity
from opteq.operators.bound import BoundOperator
from opteq.overrides import definer, overridden

DISTANCE = ("contraction", "distance_bound")
"""What an equation states for a certificate of its equilibria."""
LIPSCHITZ = ("rates", "equilibrium_lipschitz")
"""What it states of how they follow the input."""
_HIDDEN = ("hidden_rates", "hidden_distance_bound", "hidden_lipschitz")


@dataclass(frozen=True)
class _Kind:
    """What a kind of object states, and what may be overridden since no bound depends on it."""

    cls: type
    claims: tuple[str, ...]
    free: tuple[str, ...] = ()


_SOLVING = ("curvature", "first_iterate", "initial", "linearize", "objective", "reformulate", "structure")
_KINDS = (
    _Kind(Equation, DISTANCE + LIPSCHITZ, _SOLVING + _HIDDEN),
    _Kind(HiddenVariable, _HIDDEN, _SOLVING + DISTANCE + LIPSCHITZ + ("readout",)),
    _Kind(Similarity, ("hessian_bound", "largest_eigenvalue_bound", "rates"), ("linearize", "value")),
    _Kind(BoundOperator, ("quick_norm_bound",), ("gram", "norm_assumption", "norm_bound", "weight_gradient")),
    _Kind(
        Activation, ("lipschitz",), ("derivative", "slopes", "potential", "penalty", "limits", "indicator")
    ),
    _Kind(InnerProductKernel, ("largest_curvature", "unit_curvature", "largest_slope"), ("value",)),
    _Kind(Regulariser, ("curvature",), ("value",)),
    _Kind(Coupling, ("gain", "jacobian_bound"), ("linearize", "value")),
    _Kind(HeritageDiversity, ("gain",)),
    _Kind(Patches, ("merge",)),
    _Kind(WholeSample, ("merge",)),
)


def expect_own_claims(bound: Equation | BoundOperator, claims: tuple[str, ...] = ()) -> None:
    """Raise a `ConfigError` if what an equation, an operator or a part of it states need not hold for it.

    That is where a class, or an object, overrides something of the class that states a bound: who changes
    what is computed has to state anew what is known of it. Those who state a bound themselves are believed.

    Args:
        bound: the equation or operator of one batch.
        claims: which bounds of equations are asked for, `DISTANCE` or `LIPSCHITZ`.
    """
    unwanted = {*DISTANCE, *LIPSCHITZ, *_HIDDEN} - set(claims)
    parts = list(_parts(bound))
    if any(isinstance(part, HiddenReadoutEquation) for part in parts):
        unwanted -= set(_HIDDEN)
    for part in parts:
        for kind in _KINDS:
            if isinstance(part, kind.cls):
                for claim in kind.claims:
                    if claim not in unwanted:
                        _expect(part, kind, claim)


def _expect(part: object, kind: _Kind, claim: str) -> None:
    states = definer(type(part), claim)
    if states is kind.cls and inspect.isabstract(states):
        return  # made of what its classes state
    # A contraction is that of the state, whatever is read out.
    free = (*kind.free, "readout") if claim == "contraction" else kind.free
    changed = overridden(part, states, (*kind.claims, *free))
    if changed:
        raise ConfigError(
            f"{type(part).__name__} overrides `{changed}`, so that the `{claim}` of {states.__name__} need"
            f" not hold for it; give it a `{claim}` of its own."
        )


def _parts(value: Any) -> Iterator[object]:
    """An object and all that its fields hold."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
        return
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
