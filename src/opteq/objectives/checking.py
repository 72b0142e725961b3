"""A checker for regularisers of one's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.objectives.regularisers import Regulariser
from opteq.options import check, check_counts, check_kind, is_whole
from opteq.results import Described

# Sizes of the features that are tried; by how much, relative to its size, a gradient may be off in float64.
_SIZES, _TOLERANCE = (0.1, 1.0, 10.0), 1e-8
# Steps of power iteration towards each end of the Hessian's spectrum, and of its differences.
_STEPS, _STEP = 30, 1e-4
# Differences of gradients are right to about this.
_ROUNDING = 1e-5
_GAMMAS = (0.1, 1.0)
# Of the size of a value per that of its features: less is no slope.
_NOTHING = 1e-6


@dataclass(frozen=True, slots=True, repr=False)
class RegulariserReport(Described):
    """What `check_regulariser` found of a regulariser that keeps its promises.

    Attributes:
        error: the largest relative difference of `gradient` from the gradient of `value`.
        curvature: the smallest and the largest `⟨v, ∇²R v⟩` of a unit vector `v` that were found, within the
            bounds of `curvature` where it has them; further out there may be others.
    """

    error: float
    curvature: tuple[float, float]


def check_regulariser(regulariser: Regulariser, shape: tuple[int, ...], batch: int = 4) -> RegulariserReport:
    """See whether a regulariser is what it says: its gradient, curvature and prox, on random features.

    In float64, on a copy, at features of small, middle and large size, it compares `gradient` with automatic
    differentiation of `value`; where no samples are coupled, values of a batch with those of its samples one
    by one; the bounds of `curvature` with `⟨v, ∇²R v⟩`, of unit vectors `v` that power iteration on
    differences of gradients finds; and looks for points where `γR(u) + ½‖u - z‖²` is less than at
    `prox(z, γ)`. What it finds refutes the regulariser; features that show nothing do not prove it.

    Args:
        regulariser: `R`, in the mode to be looked at.
        shape: that of its features, without the batch, such as `(channels, height, width)`.
        batch: how many samples there are in a batch.

    Raises:
        ConfigError: saying what does not hold, and by how much.
        NonFiniteError: if a value or a gradient is not finite.
        ShapeError: if a value or a gradient has another shape than it should.
    """
    check_kind(Regulariser, "regulariser", regulariser, "one such as SquaredNorm()")
    given = isinstance(shape, Sequence) and all(is_whole(n) and n > 0 for n in shape)
    check(given, "shape", shape, "that of the features without the batch, such as (16, 8, 8)")
    check_counts(batch=batch)
    regulariser = copy.deepcopy(regulariser)
    if isinstance(regulariser, nn.Module):
        regulariser.double()
    generator = torch.Generator().manual_seed(0)
    error, lowest, highest = 0.0, float("inf"), -float("inf")
    for size in _SIZES:
        z = size * torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        error = max(error, _gradient_error(regulariser, z))
        if not regulariser.batch_coupled:
            _check_samples(regulariser, z)
        low, high = _curvatures(regulariser, z, torch.randn(z.shape, generator=generator).double())
        lowest, highest = min(lowest, low), max(highest, high)
        _check_prox(regulariser, z, generator)
    if regulariser.curvature is not None:
        a, b = regulariser.curvature
        slack = _ROUNDING * max(1.0, abs(lowest), abs(highest))
        if lowest < a - slack or highest > b + slack:
            raise ConfigError(
                f"`curvature` of {_name(regulariser)} says that ∇²R lies between {a:.4g} and {b:.4g}, but"
                f" there it is between {lowest:.4g} and {highest:.4g}; steps and certificates need true"
                " bounds."
            )
    return RegulariserReport(error, (lowest, highest))


def _name(regulariser: Regulariser) -> str:
    return type(regulariser).__name__


def _gradient_error(regulariser: Regulariser, z: Tensor) -> float:
    name = _name(regulariser)
    with torch.enable_grad():
        leaf = z.clone().requires_grad_()
        value = check_kind(Tensor, f"{name}.value(z)", regulariser.value(leaf), "a tensor")
        expected_shape = () if regulariser.batch_coupled else (len(z),)
        if value.shape != expected_shape:
            raise ShapeError(
                f"Expected `value` of {name} to give one number {'a sample' if expected_shape else 'in all'},"
                f" of shape {expected_shape}, got {tuple(value.shape)}."
            )
        if not value.requires_grad:
            raise ConfigError(
                f"`value` of {name} has lost its way back to the features; compute it by torch, without"
                " detach()."
            )
        (expected,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True, materialize_grads=True)
    found = check_kind(Tensor, f"{name}.gradient(z)", regulariser.gradient(z), "a tensor").detach()
    if found.shape != z.shape:
        raise ShapeError(
            f"Expected `gradient` of {name} to have the shape of the features, {tuple(z.shape)}, got"
            f" {tuple(found.shape)}."
        )
    if not (value.isfinite().all() and found.isfinite().all()):
        raise NonFiniteError(f"{name} is not finite at random features; look at its `value` and `gradient`.")
    # A gradient of nothing but rounding has no size of its own.
    size = max(expected.norm().item(), _NOTHING * (value.abs().sum() / z.norm()).item())
    error = (found - expected).norm().item() / (size or 1.0)
    if error > _TOLERANCE:
        raise ConfigError(
            f"`gradient` of {name} is not the gradient of its `value`: it differs by {error:.1e} of its size"
            " from that of automatic differentiation; correct one of the two."
        )
    return error


def _check_samples(regulariser: Regulariser, z: Tensor) -> None:
    alone = torch.cat([regulariser.value(sample) for sample in z.split(1)])
    if not torch.allclose(regulariser.value(z), alone, rtol=_TOLERANCE):
        raise ConfigError(
            f"`value` of {_name(regulariser)} for one sample depends on the others of a batch; take nothing"
            " over the first dimension, or derive it from BatchRegulariser."
        )


def _curvatures(regulariser: Regulariser, z: Tensor, start: Tensor) -> tuple[float, float]:
    """The smallest and the largest `⟨v, ∇²R v⟩` that power iteration from `start` comes across."""
    rows = 1 if regulariser.batch_coupled else len(z)
    found: list[Tensor] = []

    def unit(v: Tensor) -> Tensor:
        flat = v.reshape(rows, -1)
        return (flat / flat.norm(dim=1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)).view(v.shape)

    def product(v: Tensor) -> Tensor:
        step = _STEP * max(1.0, float(z.abs().max()))
        difference = regulariser.gradient(z + step * v) - regulariser.gradient(z - step * v)
        image = difference.detach() / (2 * step)
        found.append((v * image).reshape(rows, -1).sum(1))
        return image

    v = unit(start)
    for _ in range(_STEPS):
        v = unit(product(v))
    # The end of the spectrum that is larger in size; from there towards the other one.
    farthest = found[-1].view(-1, *[1] * (z.dim() - 1))
    v = unit(start)
    for _ in range(_STEPS):
        v = unit(product(v) - farthest * v)
    values = torch.stack(found)
    return values.min().item(), values.max().item()


def _check_prox(regulariser: Regulariser, z: Tensor, generator: torch.Generator) -> None:
    """Look for points that are better than what `prox` says."""

    def objective(u: Tensor, gamma: float) -> Tensor:
        return gamma * regulariser.value(u) + 0.5 * (u - z).square().flatten(1).sum(1)

    for gamma in _GAMMAS:
        try:
            u = regulariser.prox(z, gamma)
        except ConfigError:
            return
        best = objective(u, gamma)
        for size in (1e-3, 1e-1, 1.0):
            others = u + size * torch.randn(u.shape, generator=generator).double()
            # Also straight towards z, and towards nothing.
            for other in (others, torch.lerp(u, z, size), (1 - size) * u):
                lack = (best - objective(other, gamma)).max().item()
                if lack > _TOLERANCE * max(1.0, float(best.abs().max())):
                    raise ConfigError(
                        f"`prox` of {_name(regulariser)} at γ = {gamma:g} is no minimum of γR(u) + ½‖u - z‖²:"
                        f" elsewhere that is less by {lack:.1e}; correct it."
                    )
