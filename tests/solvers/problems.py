"""Fixed-point problems with known solutions, and a map whose state has two branches."""

from dataclasses import dataclass

import torch
from torch import nn

from opteq.equation import Equation
from opteq.maps.base import EquilibriumMap
from opteq.results import Certificate


@dataclass(frozen=True)
class Affine:
    """`T(z) = A z + b`, one symmetric `A` per sample with eigenvalues spread over `[0, rate]`.

    `T` is a gradient step of length 1 on a convex quadratic, so every solver may be asked to solve it.
    """

    matrix: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def random(cls, rates, size=12, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        square = torch.randn(len(rates), size, size, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(square)[0]
        spectrum = torch.tensor(rates, dtype=torch.float64)[:, None] * torch.linspace(0, 1, size).double()
        matrix = basis @ torch.diag_embed(spectrum) @ basis.mT
        offset = torch.randn(len(rates), size, generator=generator, dtype=torch.float64)
        return cls(matrix.to(dtype), offset.to(dtype))

    def __call__(self, z):
        return (self.matrix @ z[..., None])[..., 0] + self.offset

    def __getitem__(self, index):
        return Affine(self.matrix[index], self.offset[index])

    @property
    def start(self):
        return torch.zeros_like(self.offset)

    @property
    def solution(self):
        identity = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype)
        return torch.linalg.solve(identity - self.matrix, self.offset)


class Recorder:
    """A map that keeps every input it is called with."""

    def __init__(self, function):
        self.function, self.inputs = function, []

    def __call__(self, z):
        self.inputs.append(z.clone())
        return self.function(z)


class TwoBranches(EquilibriumMap):
    """`z_i = W_iᵀ tanh(W_1 z_1 + W_2 z_2 + x)` with states of shapes (batch, 3) and (batch, 2, 2, 2).

    It is the OptEq unit with `W = [W_1, W_2]`, its state cut in two.
    """

    def __init__(self, norm=0.9):
        super().__init__()
        joint = torch.randn(6, 11, dtype=torch.float64)
        joint *= norm / torch.linalg.matrix_norm(joint, 2)
        self.first = nn.Parameter(joint[:, :3].clone())
        self.second = nn.Parameter(joint[:, 3:].clone())

    @property
    def joint_weight(self):
        return torch.cat((self.first, self.second), dim=1)

    def bind(self, x, error=0.0):
        return TwoBranchEquation(x, self.first, self.second)


@dataclass(frozen=True, eq=False)
class TwoBranchEquation(Equation):
    injection: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    @property
    def structure(self):
        return "proximal"

    def initial(self):
        batch = len(self.injection)
        return self.injection.new_zeros(batch, 3), self.injection.new_zeros(batch, 2, 2, 2)

    def _preactivation(self, state):
        return state[0] @ self.first.mT + state[1].flatten(1) @ self.second.mT + self.injection

    def __call__(self, state):
        hidden = self._preactivation(state).tanh()
        return hidden @ self.first, (hidden @ self.second).unflatten(1, (2, 2, 2))

    @property
    def objective(self):
        return self._objective

    def _objective(self, state):
        square = state[0].square().sum(1) + state[1].square().flatten(1).sum(1)
        return 0.5 * square - self._preactivation(state).cosh().log().sum(1)

    def contraction(self, state=None):
        return Certificate(torch.linalg.matrix_norm(torch.cat(self.tensors[1:], dim=1), 2).square(), "exact")


def joined(state):
    """The two branches side by side, `(batch, 11)`."""
    return torch.cat([branch.flatten(1) for branch in state], dim=1)
