"""Small maps of the OptEq family, in float64, and slow counterparts of what they compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, OptEqUnit
from opteq.maps.base import EquilibriumMap
from tests.conformance.instances import seeded
from tests.conformance.reference import random

STATE, INPUT = 5, 3
# Some contract by 1e-4 a step: how soon Anderson is there hangs on rounding, by thousands of steps.
EXACT = Anderson(tol=1e-13, max_steps=20_000)


def dense_unit(
    seed: int = 0,
    hidden: int = 6,
    activation: str = "relu",
    norm: float | Sequence[float] = 0.9,
    mu: float = 1.0,
    state: int = STATE,
) -> OptEqUnit:
    """A unit whose `W` has the given norm (or singular values), not constrained."""
    module = seeded(
        lambda: OptEqUnit(Dense(state, hidden), Dense(INPUT, hidden), activation, mu=mu, max_norm=None), seed
    )
    with torch.no_grad():
        left, values, right = torch.linalg.svd(module.W.weights[0], full_matrices=False)
        given = torch.linspace(norm, norm / 3, len(values)) if isinstance(norm, float) else torch.tensor(norm)
        module.W.weights[0].copy_(left @ torch.diag(given.double()) @ right)
        assert module.injection.bias is not None
        module.injection.bias.copy_(random(hidden, seed=seed + 50))
    return module


def conv_unit(seed: int = 0, activation: str = "relu") -> OptEqUnit:
    """A convolutional unit on two channels, its weights well above the ceiling of 0.9."""
    module = seeded(lambda: OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), activation, max_norm=0.9), seed)
    with torch.no_grad():
        module.W.weights[0].mul_(4)
        assert module.injection.bias is not None
        module.injection.bias.copy_(random(3, seed=seed + 50))
    return module


def mixed_units(count: int, norm: float = 0.9) -> list[OptEqUnit]:
    """Units of different widths and activations on one state."""
    activations = ("relu", "tanh", "softplus", "elu", "relu")
    return [dense_unit(i, 4 + i, activations[i], norm) for i in range(count)]


def equilibrium(module: EquilibriumMap, x: Tensor) -> Tensor:
    """The equilibrium to 1e-13."""
    z = EquilibriumLayer(module, EXACT, on_unconverged="raise")(x)
    assert isinstance(z, Tensor)
    return z.detach()


def inputs(batch: int = 4, seed: int = 0) -> Tensor:
    return 2 * random(batch, INPUT, seed=seed)


def formula(unit: OptEqUnit, x: Tensor, z: Tensor) -> Tensor:
    """`(1/μ) Wᵀσ(W z + U x + b)` sample by sample, from the stored weights."""
    (W,) = unit.W.weights
    U, b = unit.injection.operator.weight, unit.injection.bias
    rows = [W.mT @ unit.activation(W @ zi + U @ xi + b) / unit.mu for xi, zi in zip(x, z, strict=True)]
    return torch.stack(rows)
