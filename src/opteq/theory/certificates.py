"""What can be said for certain about a computed equilibrium."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from opteq.errors import ConfigError, ShapeError
from opteq.layer import EquilibriumLayer
from opteq.notebook import html_table
from opteq.results import Certificate, State, distance, map_state, norm, residual_text
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import solve_fixed_point
from opteq.theory.arguments import expect_layer
from opteq.theory.claims import DISTANCE, expect_own_claims
from opteq.theory.exact import in_float64
from opteq.theory.lipschitz import expect_module

_REFERENCE = Anderson(tol=1e-12, max_steps=2000)


@dataclass(frozen=True, slots=True, repr=False)
class LayerCertificate:
    """What is known about the equilibria of one batch; every number is per sample, in float64.

    Attributes:
        state: the equilibrium `z` that the layer computed, of which residual and contraction are. Distances
            are of what it reads out: of the `z = W y` of coupled kernel maps, whose state is `y`, and of the
            `y` of a `HiddenReadout`.
        residual: `(batch,)` `‖T(z)-z‖ / ‖T(z)‖`.
        contraction: bound on the Lipschitz constant of `T`; below 1 the equilibrium is unique.
        local_contraction: bound on `‖J‖` at `z`.
        distance: bound on `‖z - z*‖`, or the same of what is read out; infinite where none is known.
        distance_to_reference: estimate of that from a solve to a residual of 1e-12; NaN where
            that one did not converge.
        objective: `(batch,)` hidden objective at `z`; None for maps without one.
        objective_at_reference: the same at the tightly solved equilibrium.
    """

    state: State
    residual: Tensor
    contraction: Certificate
    local_contraction: Certificate
    distance: Certificate
    distance_to_reference: Certificate
    objective: Tensor | None
    objective_at_reference: Tensor | None

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {text}" for name, text in self._rows().items())
        return f"{type(self).__name__}({rows})"

    def _repr_html_(self) -> str:
        return html_table("Certificate", self._rows())

    def _rows(self) -> dict[str, str]:
        """What a reader looks for first, for the sample of which it is largest."""
        return {
            "samples": f"{len(self.residual)}",
            "largest distance": f"{_largest(self.distance.value):.1e} ({self.distance.kind})",
            "largest contraction": f"{_largest(self.contraction.value):.6g} ({self.contraction.kind})",
            "largest residual": residual_text(_largest(self.residual)),
        }


def _largest(values: Tensor) -> float:
    return values.max().item() if values.numel() else 0.0


@torch.no_grad()
def certify(layer: EquilibriumLayer, x: State) -> LayerCertificate:
    """Certify the equilibria that a layer finds for a batch of inputs.

    The layer runs as it is. Its answer is then examined in float64, by what the equation of the same weights
    and inputs in float64 says of itself: `contraction`, `distance_bound` and `objective` of
    `opteq.equation.Equation`. So the distance to `z*` has in it what rounding did in lower precision, to
    `c = U x + b` and to the scale of a `W` under a ceiling as to the solve.

    Args:
        layer: the layer.
        x: a batch of inputs.

    Raises:
        ConfigError: for something else than a layer, one with forward hooks, a map of yours whose readout is
            not its state, a subclass that overrides what its equation computes without stating anew what is
            known of that, a map whose samples enter each other's equation, as in training with a
            batch-coupled regulariser or a batch norm, or one that is random, as with dropout in training.
        NonFiniteError: for weights or inputs that are NaN or infinite.
    """
    expect_layer(layer)
    expect_module(layer)
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise ConfigError(
            "The layer has a forward hook, which may change what is read or given: a certificate is of the"
            " equilibrium of `x`; remove the hook."
        )
    _expect_own_statistics(layer)
    try:
        once, again = layer.bind(x), layer.bind(x)
    except ShapeError as error:
        raise ShapeError(
            f"{error} A layer inside a network takes what enters it there, not the images of the network."
        ) from error
    if any(map(_differ, once.tensors, again.tensors)):
        raise ConfigError(
            "The map is another one each time that it reads the input, as with dropout in training, so that"
            " what is certified is not what was solved; call eval() first, and leave out what is random."
        )
    if once.batch_coupled:
        raise ConfigError(
            "In training the regulariser makes one system of the batch, with no certificate for a sample;"
            " call eval() first."
        )
    solution = layer.solve(x)
    equation = in_float64(layer).bind(map_state(Tensor.double, x))
    expect_own_claims(equation, DISTANCE)
    # A `U` of others may give another precision than it is asked for.
    equation = equation.with_tensors(tuple(t.detach().double() for t in equation.tensors))
    z, answer = map_state(Tensor.double, solution.state), map_state(Tensor.double, solution.value)
    image = equation(z)
    reference, info = solve_fixed_point(equation, z, _REFERENCE)
    gap = distance(equation.readout(reference), answer)
    bound = equation.distance_bound(z)
    # Reading the answer from the state rounds once more.
    bound = replace(bound, value=bound.value + distance(answer, equation.readout(z)))
    objective = at_reference = None
    if equation.objective is not None:
        objective = equation.objective(z)
        at_reference = equation.objective(reference).where(info.converged, torch.nan)
    return LayerCertificate(
        solution.state,
        distance(z, image) / norm(image).clamp(min=torch.finfo(torch.float64).tiny),
        equation.contraction(),
        equation.contraction(z),
        bound,
        Certificate(gap.where(info.converged, torch.nan), "estimate", ("The reference is the equilibrium.",)),
        objective,
        at_reference,
    )


def _expect_own_statistics(layer: EquilibriumLayer) -> None:
    """Raise a `ConfigError` for a batch norm that goes by the batch, before it has taken note of this one."""
    for name, part in layer.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            kept = "" if part.track_running_stats else " and give it track_running_stats=True"
            raise ConfigError(
                f"{name} normalises by the mean and the variance of the batch, so that a certificate would be"
                f" of this batch alone; call eval() first{kept}."
            )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether they differ by more than the order of sums changes."""
    return bool((one - other).norm() > 1e-3 * one.norm())
