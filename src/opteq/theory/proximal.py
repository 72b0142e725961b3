"""A checker for proximal operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.options import check_kind
from opteq.results import Described

_LARGEST_STATE = 2048


@dataclass(frozen=True, slots=True, repr=False)
class ProximalReport(Described):
    """How far a map's Jacobian `J` is from that of a proximal operator, point by point.

    Attributes:
        asymmetry: `(points,)` norm of `½(J - Jᵀ)`; zero for a gradient.
        smallest: `(points,)` smallest eigenvalue of `½(J + Jᵀ)`; at least zero for a convex potential.
        norm: `(points,)` `‖J‖₂`; at most one for a nonexpansive map.
        tolerance: by how much each may be off.
    """

    asymmetry: Tensor
    smallest: Tensor
    norm: Tensor
    tolerance: float

    @property
    def is_proximal(self) -> Tensor:
        """`(points,)` whether the map looks like a proximal operator at a point."""
        symmetric = self.asymmetry <= self.tolerance
        return symmetric & (self.smallest >= -self.tolerance) & (self.norm <= 1 + self.tolerance)

    def __str__(self) -> str:
        count = int(self.is_proximal.sum())
        return (
            f"a proximal operator at {count} of {len(self.norm)} points: asymmetry at most"
            f" {self.asymmetry.max().item():.2g}, eigenvalues at least {self.smallest.min().item():.2g},"
            f" norm at most {self.norm.max().item():.4g}"
        )


def check_proximal(
    function: Callable[[Tensor], Tensor], points: Tensor, tolerance: float = 1e-6
) -> ProximalReport:
    """Look whether a map is a proximal operator, at sampled points.

    A map is the proximal operator of a convex function if and only if it is nonexpansive and the
    gradient of a convex function (Moreau 1965); where it is differentiable, its Jacobian is then
    symmetric, positive semidefinite and of norm at most 1 (Xie et al. 2022, Lemmas 5-6). One point
    where this fails refutes the map; points where it holds do not prove it.

    Args:
        function: `(batch, ...) ↦ (batch, ...)` sample by sample, such as an `Equation`.
        points: `(points, ...)`, float64 for the default tolerance.
        tolerance: by how much symmetry, semidefiniteness and norm may be off.

    Raises:
        ConfigError: if the points are no tensor, or the value at one of them changes with the others.
        NonFiniteError: if a Jacobian is NaN or infinite.
        ShapeError: if there are no points, they are no floating-point numbers, or the map changes the shape
            or has more than 2048 entries per sample.
    """
    check_kind(Tensor, "points", points, "a tensor of shape (points, ...)")
    if points.dim() < 2 or not points.is_floating_point():
        raise ShapeError(
            f"Expected `points` of shape (points, ...) in floating-point numbers, got {tuple(points.shape)}"
            f" of {points.dtype}."
        )
    if not len(points):
        raise ShapeError("Expected at least one point to look at, got none.")
    count = points[0].numel()
    if count > _LARGEST_STATE:
        raise ShapeError(
            f"The check builds whole Jacobians: expected at most {_LARGEST_STATE} entries per point,"
            f" got {count}; use smaller images or fewer channels."
        )
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        values = function(points)
        if not isinstance(values, Tensor) or values.shape != points.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(f"Expected a map that keeps the shape {tuple(points.shape)}, got {got}.")
        _expect_alone(function, points.detach(), values.detach(), tolerance)
        # A map that is constant does not depend on the points.
        sums = values.flatten(1).sum(0) + 0 * points.sum()
        rows = [torch.autograd.grad(entry, points, retain_graph=True)[0].flatten(1) for entry in sums]
    jacobian = torch.stack(rows, dim=1)
    if not bool(jacobian.isfinite().all()):
        raise NonFiniteError("The Jacobian of the map has NaN or infinite entries; look at other points.")
    symmetric, skew = 0.5 * (jacobian + jacobian.mT), 0.5 * (jacobian - jacobian.mT)
    return ProximalReport(
        torch.linalg.matrix_norm(skew, 2),
        torch.linalg.eigvalsh(symmetric)[:, 0],
        torch.linalg.matrix_norm(jacobian, 2),
        tolerance,
    )


def _expect_alone(
    function: Callable[[Tensor], Tensor], points: Tensor, values: Tensor, tolerance: float
) -> None:
    """Raise a `ConfigError` unless the value at a point stays when it takes the places of all the others.

    So many points are given again, as an equation is of one batch. Without this the Jacobian at one point
    would have in it what the others change.
    """
    for place in (0, len(points) - 1):
        alone = function(points[place].expand_as(points).clone())[place].detach()
        if not torch.allclose(alone, values[place], rtol=tolerance, atol=tolerance, equal_nan=True):
            raise ConfigError(
                f"Expected a map that treats every point by itself, but its value at point {place} changes"
                " when the others do, or from call to call; leave out batch norm in training mode, what is"
                " taken over the batch, and what is random."
            )
