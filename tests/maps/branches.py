"""Multi-branch models in float64, and their objective as the paper writes it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq import AveragePool, Compose, Conv2d, HeritageDiversity, MOptEq, OptEqUnit
from tests.conformance.instances import seeded
from tests.conformance.reference import random


def branch_units(
    sizes: Sequence[int],
    channels: int,
    mids: Sequence[int],
    activation: str = "relu",
    max_norm: float | None = 0.8,
    seed: int = 0,
) -> list[OptEqUnit]:
    """Convolutional units whose weights start well above the ceiling, with random biases.

    The input has the size of the first branch; each `U` brings it to its own.
    """

    def unit(size: int, mid: int) -> OptEqUnit:
        U = Conv2d(channels, mid, 3)
        if size < sizes[0]:
            U = Compose(AveragePool(channels, sizes[0] // size), U)
        return OptEqUnit(Conv2d(channels, mid, 3), U, activation, max_norm=max_norm)

    units = []
    for i, (size, mid) in enumerate(zip(sizes, mids, strict=True)):
        module = seeded(lambda size=size, mid=mid: unit(size, mid), seed + 10 * i)
        with torch.no_grad():
            module.W.weights[0].mul_(4)
            assert module.injection.bias is not None
            module.injection.bias.copy_(0.3 * random(mid, seed=seed + 10 * i + 5))
        units.append(module)
    return units


def single_view(seed: int = 0, max_norm: float = 0.84, **options) -> MOptEq:
    """The small model of the paper, `C = 32` and `λ = 0.01`, on three branches."""
    units = branch_units((4, 4, 4), 32, (64, 128, 128), max_norm=max_norm, seed=seed)
    return MOptEq(units, HeritageDiversity(0.01, **options))


def bring(z: Tensor, size: Sequence[int]) -> Tensor:
    """`P z`: pooled if `z` is larger than `size`, the transpose of that pooling if it is smaller."""
    if z.shape[2] >= size[0]:
        return torch.nn.functional.avg_pool2d(z, z.shape[2] // size[0])
    factor = size[0] // z.shape[2]
    return z.repeat_interleave(factor, 2).repeat_interleave(factor, 3) / factor**2


def ring_objective(
    z: Sequence[Tensor],
    weight: float,
    width: Tensor | None = None,
    heritage: bool = True,
    diversity: bool = True,
) -> Tensor:
    """`(batch,)` `Σ_i λD(z_i, z_{i+1}) - H(z_i, z_{i+1})`, channel pair by channel pair."""
    total = torch.zeros(len(z[0]), dtype=z[0].dtype)
    for i, a in enumerate(z):
        b = bring(z[(i + 1) % len(z)], a.shape[2:])
        for k in range(a.shape[1]):
            for m in range(a.shape[1]):
                product = (a[:, k] * b[:, m]).flatten(1).sum(1)
                if k == m:
                    total = total - heritage * product
                elif width is None:
                    total = total + diversity * weight * product.abs()
                else:
                    huber = torch.where(
                        product.abs() > width, product.abs() - width / 2, product**2 / (2 * width)
                    )
                    total = total + diversity * weight * huber
    return total


def sweep_gradients(equation, state, wanted, damping):
    """Gradients of `Σ ⟨readout, random⟩` through one evaluation, and through the first two terms of a series.

    The adjoint is `g`, or `λ(g + ((1-λ)I + λJᵀ)g)`, by automatic differentiation of the evaluation alone.
    """
    leaves = tuple(t.detach().requires_grad_() for t in state)
    image, read = equation(leaves), equation.readout(leaves)
    cotangents = tuple(random(*t.shape, seed=i) for i, t in enumerate(read))
    # What the readout, which is linear, hands to the weights by itself and to the state.
    own = gradients_of(read, wanted, cotangents)
    g = gradients_of(read, leaves, cotangents)
    moved = gradients_of(image, leaves, g)
    series = [damping * ((2 - damping) * a + damping * b) for a, b in zip(g, moved, strict=True)]
    return [[a + b for a, b in zip(own, gradients_of(image, wanted, u), strict=True)] for u in (g, series)]


def gradients_of(outputs, inputs, cotangents):
    return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, materialize_grads=True)
