"""Units whose activation is a linear map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.maps.base import Injection, expect_operator
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.base import LinearOperator
from opteq.operators.compose import Compose
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.options import check_kind


class LinearMixing(OptEqUnit):
    """`T(z) = (1/μ) WᵀS(W z + U x + b)`, `S` symmetric positive definite (Xie et al. 2022, Table 1).

    `S` mixes the hidden channels, the same at every pixel, in place of the activation. With a factor
    `S = RᵀR` this is the OptEq unit of `RW` without activation, hence a proximal operator if
    `λ_max(S)‖W‖² ≤ μ`; `max_norm` is the ceiling on `‖RW‖`. The fixed point is linear in the input:
    it solves `(μI - WᵀSW) z = WᵀS(U x + b)`. `R` is learned, so `S` stays positive definite.

    Args:
        W: opteq operator from the state to the hidden channels.
        U: opteq operator (or any module) from the input to the hidden channels.
        mixing: initial `S`, `(n, n)` for `n` hidden channels.
        bias: whether there is a `b`.
        mu: `μ > 0`.
        max_norm: ceiling on `‖RW‖₂`, or None; `max_norm² ≤ μ` makes the condition hold.

    Raises:
        ConfigError: if `mixing` is not a symmetric positive-definite matrix of the right size, or for
            options out of range.
    """

    def __init__(
        self,
        W: LinearOperator,
        U: nn.Module,
        mixing: Tensor,
        bias: bool = True,
        mu: float = 1.0,
        max_norm: float | None = 0.97,
    ) -> None:
        expect_operator(W, "W")
        n = W.out_channels
        check_kind(Tensor, "mixing", mixing, "a tensor")
        if mixing.shape != (n, n):
            raise ConfigError(f"Expected `mixing` of shape ({n}, {n}), got {tuple(mixing.shape)}.")
        factor, failed = torch.linalg.cholesky_ex(mixing)
        if failed or not torch.allclose(mixing, mixing.mT):
            raise ConfigError("Expected a symmetric positive-definite `mixing`.")
        root = Conv2d(n, n, 1) if W.sides else Dense(n, n)
        root.weight = nn.Parameter(factor.mT.reshape(root.weight.shape).clone())
        injection = nn.Sequential(Injection(U, n, bias), root)
        super().__init__(Compose(W, root), injection, "identity", False, mu, max_norm)
