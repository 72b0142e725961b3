"""What the conformance suites run on. A new implementation joins its suite by an entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from opteq import (
    AbsoluteNorm,
    AffineChange,
    AveragePool,
    Compose,
    Conv2d,
    DeepOptEq,
    Dense,
    DepthwiseSeparableConv2d,
    GaussianMap,
    HeritageDiversity,
    HiddenReadout,
    KernelMap,
    KernelMOptEq,
    LinearMixing,
    MOptEq,
    MoreauSkip,
    OptEqUnit,
    Parallel,
    Patches,
    PolynomialKernel,
    Regularised,
    SimilarityMap,
    SquaredNorm,
    WideOptEq,
)
from opteq.activations import (
    ELU,
    Activation,
    HardTanh,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    StronglyMonotone,
    Tanh,
)
from opteq.equation import Equation
from opteq.maps.base import EquilibriumMap
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from tests.conformance.flat import Flattened
from tests.conformance.reference import random

M = TypeVar("M", bound=torch.nn.Module)


def seeded(build: Callable[[], M], seed: int = 0) -> M:
    """A module in float64 whose initial weights depend on `seed` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


@dataclass(frozen=True)
class OperatorCase:
    build: Callable[[], LinearOperator]
    domain: tuple[int, ...]

    def operator(self, seed: int = 0) -> LinearOperator:
        return seeded(self.build, seed)

    def bound(self, seed: int = 0) -> BoundOperator:
        return self.operator(seed).bind(self.domain)


OPERATORS = {
    "dense": OperatorCase(lambda: Dense(5, 8), (5,)),
    "dense-wide": OperatorCase(lambda: Dense(7, 3), (7,)),
    "dense-one": OperatorCase(lambda: Dense(1, 1), (1,)),
    "conv": OperatorCase(lambda: Conv2d(2, 3, 3), (2, 5, 4)),
    "conv-pointwise": OperatorCase(lambda: Conv2d(3, 4, 1), (3, 2, 3)),
    "conv-larger-than-image": OperatorCase(lambda: Conv2d(2, 3, 7), (2, 2, 2)),
    "conv-one-pixel": OperatorCase(lambda: Conv2d(3, 2, 3), (3, 1, 1)),
    "conv-grouped": OperatorCase(lambda: Conv2d(4, 6, 3, groups=2), (4, 3, 4)),
    "conv-depthwise": OperatorCase(lambda: Conv2d(3, 6, 3, groups=3), (3, 4, 3)),
    "separable": OperatorCase(lambda: DepthwiseSeparableConv2d(3, 4), (3, 4, 3)),
    "separable-multiplier": OperatorCase(lambda: DepthwiseSeparableConv2d(2, 3, 5, multiplier=2), (2, 4, 4)),
    "separable-twice": OperatorCase(
        lambda: Compose(DepthwiseSeparableConv2d(2, 4, 5, multiplier=2), DepthwiseSeparableConv2d(4, 3)),
        (2, 4, 3),
    ),
    "pool": OperatorCase(lambda: AveragePool(2, 2), (2, 4, 6)),
    "pool-nothing": OperatorCase(lambda: AveragePool(2, 1), (2, 3, 4)),
    "pool-twice": OperatorCase(lambda: Compose(AveragePool(2, 2), AveragePool(2, 3)), (2, 6, 6)),
    "pool-then-conv": OperatorCase(lambda: Compose(AveragePool(2, 2), Conv2d(2, 3, 3)), (2, 4, 4)),
}

ACTIVATIONS: list[Activation] = [
    Identity(),
    ReLU(),
    LeakyReLU(),
    LeakyReLU(0.5),
    ELU(),
    Tanh(),
    Sigmoid(),
    SoftThreshold(),
    SoftThreshold(0.7),
    HardTanh(),
    Softplus(),
    StronglyMonotone(),
    StronglyMonotone(0.6),
]


@dataclass(frozen=True)
class MapCase:
    build: Callable[[], EquilibriumMap]
    input: tuple[int, ...]

    def map(self, seed: int = 0) -> EquilibriumMap:
        return seeded(lambda: _spread(self.build()), seed)

    def inputs(self, batch: int = 3, seed: int = 0) -> torch.Tensor:
        return random(batch, *self.input, seed=seed)

    def equation(self, seed: int = 0) -> Equation:
        return self.map(seed).bind(self.inputs(seed=seed + 100))


def _spread(module: EquilibriumMap) -> EquilibriumMap:
    """Biases start at zero, where an error in their gradient or sign would not show."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return module


MAPS = {
    "unit-dense": MapCase(lambda: OptEqUnit(Dense(4, 6), Dense(3, 6)), (3,)),
    "unit-conv-tanh": MapCase(lambda: OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh"), (2, 3, 3)),
    "unit-constrained": MapCase(lambda: OptEqUnit(Dense(5, 4), Dense(3, 4), "softplus", max_norm=0.5), (3,)),
    "unit-mu": MapCase(lambda: OptEqUnit(Dense(4, 5), Dense(3, 5), "elu", mu=2.5, max_norm=1.2), (3,)),
    "unit-separable": MapCase(
        lambda: OptEqUnit(DepthwiseSeparableConv2d(2, 3), Conv2d(2, 3), max_norm=0.6), (2, 3, 2)
    ),
    "gaussian-plain": MapCase(lambda: GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.5), (3,)),
    "gaussian-plain-adaptive": MapCase(lambda: GaussianMap(Conv2d(2, 3), Conv2d(1, 3)), (1, 3, 2)),
    "gaussian-patches": MapCase(
        lambda: GaussianMap(Conv2d(2, 4), Conv2d(2, 4), Patches(2, 2), hidden=5), (2, 4, 4)
    ),
    "gaussian-patches-constrained": MapCase(
        lambda: GaussianMap(
            Conv2d(2, 4, 3), Conv2d(1, 4, 3), Patches(4, 1), hidden=3, activation="tanh", max_norm=0.6
        ),
        (1, 3, 2),
    ),
    "kernel-linear": MapCase(lambda: KernelMap(Dense(4, 5), Dense(3, 4)), (3,)),
    "kernel-polynomial": MapCase(lambda: KernelMap(Dense(4, 3), Dense(3, 4), "polynomial"), (3,)),
    "kernel-sigmoid": MapCase(
        lambda: KernelMap(Conv2d(2, 3), Conv2d(1, 2), "sigmoid", activation="tanh"), (1, 3, 2)
    ),
}


def _units(*activations: str) -> list[OptEqUnit]:
    return [OptEqUnit(Dense(4, 3 + i), Dense(3, 3 + i), name) for i, name in enumerate(activations)]


class Student(torch.nn.Module):
    """`S(y; c) = -½ log(1 + ‖c - W y‖²)`, whose Hessian lies within `‖W‖²[-1, 1/8]`."""

    def __init__(self) -> None:
        super().__init__()
        self.W = Dense(4, 5)
        torch.nn.init.normal_(self.W.weight, std=0.2)

    def forward(self, y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return -0.5 * torch.log1p((c - self.W(y)).square().sum(1))


# Maps whose contraction is an estimate.
ESTIMATED_MAPS = {"own": MapCase(lambda: SimilarityMap(Student(), Dense(3, 5), 4), (3,))}

# Similarities that are unbounded, or too steep for a contraction.
STEEP_MAPS = {
    "kernel-cubic": MapCase(lambda: KernelMap(Dense(4, 5), Dense(3, 4), PolynomialKernel(3)), (3,)),
    "kernel-sigmoid-printed": MapCase(
        lambda: KernelMap(Dense(4, 5), Dense(3, 4), "sigmoid", normalise=False), (3,)
    ),
}

# Maps made of other maps.
COMPOSED_MAPS = {
    "skip": MapCase(lambda: MoreauSkip(OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh"), 0.6), (2, 3, 3)),
    "affine": MapCase(
        lambda: AffineChange(
            _units("softplus")[0], torch.eye(4) + 0.3 * torch.ones(4, 4).tril(), torch.ones(4)
        ),
        (3,),
    ),
    "hidden": MapCase(lambda: HiddenReadout(OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh")), (2, 3, 3)),
    "hidden-deep": MapCase(lambda: HiddenReadout(DeepOptEq(_units("tanh", "elu"), 0.7)), (3,)),
    "mixing": MapCase(lambda: LinearMixing(Dense(4, 3), Dense(3, 3), torch.eye(3) + 0.2), (3,)),
    "wide": MapCase(lambda: WideOptEq(_units("tanh", "relu", "elu")), (3,)),
    "deep-one": MapCase(lambda: DeepOptEq(_units("tanh"), 0.7), (3,)),
    "deep-two": MapCase(lambda: DeepOptEq(_units("tanh", "elu"), [0.8, 0.6], learn_alpha=True), (3,)),
    "deep-three": MapCase(lambda: DeepOptEq(_units("relu", "tanh", "softplus"), learn_alpha=True), (3,)),
    "regularised-gradient": MapCase(lambda: Regularised(_units("tanh")[0], SquaredNorm(), 1.2), (3,)),
    "regularised-prox": MapCase(
        lambda: Regularised(_units("softplus")[0], AbsoluteNorm(), 0.02, "prox"), (3,)
    ),
    "parallel": MapCase(
        lambda: Flattened(
            Parallel(
                [
                    OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh"),
                    GaussianMap(Conv2d(3, 2), Compose(AveragePool(2, 2), Conv2d(2, 2)), gamma=0.5),
                ]
            )
        ),
        (2, 4, 4),
    ),
    "parallel-deep": MapCase(
        lambda: Flattened(Parallel([DeepOptEq(_units("tanh", "elu"), 0.8), _units("softplus")[0]])), (3,)
    ),
    "branches": MapCase(
        lambda: Flattened(MOptEq(_units("tanh", "relu", "elu"), HeritageDiversity(0.02, tau=0.2))), (3,)
    ),
    "branches-two-sizes": MapCase(
        lambda: Flattened(
            MOptEq(
                [
                    OptEqUnit(Conv2d(3, 2), Conv2d(2, 2), "softplus", mu=1.3, max_norm=0.9),
                    OptEqUnit(Conv2d(3, 4), Compose(AveragePool(2, 2), Conv2d(2, 4)), "tanh", max_norm=0.8),
                ],
                HeritageDiversity(0.2, tau=0.3),
                perturbation=0.1,
            )
        ),
        (2, 4, 2),
    ),
    "branches-heritage": MapCase(
        lambda: Flattened(MOptEq(_units("tanh", "softplus"), HeritageDiversity(diversity=False))), (3,)
    ),
    "branches-kernels": MapCase(
        lambda: Flattened(
            KernelMOptEq(
                [
                    KernelMap(Dense(3, 4), Dense(3, 3), "sigmoid", activation="tanh", max_norm=0.9),
                    KernelMap(Dense(5, 4), Dense(3, 5), "polynomial", activation="softplus", max_norm=0.9),
                    KernelMap(Dense(4, 4), Dense(3, 4), "linear", max_norm=0.9),
                ],
                HeritageDiversity(0.02, tau=0.2),
            )
        ),
        (3,),
    ),
    "branches-kernels-two-sizes": MapCase(
        lambda: Flattened(
            KernelMOptEq(
                [
                    KernelMap(Conv2d(2, 3), Conv2d(2, 2), "polynomial", activation="tanh", max_norm=0.8),
                    KernelMap(
                        Conv2d(4, 3), Compose(AveragePool(2, 2), Conv2d(2, 4)), "sigmoid", max_norm=0.8
                    ),
                ],
                HeritageDiversity(0.2, tau=0.3),
                perturbation=0.1,
            )
        ),
        (2, 4, 2),
    ),
    "branches-kernels-heritage": MapCase(
        lambda: Flattened(
            KernelMOptEq(
                [KernelMap(Dense(n, 4), Dense(3, n), "sigmoid", max_norm=0.9) for n in (3, 5)],
                HeritageDiversity(diversity=False),
            )
        ),
        (3,),
    ),
}
