"""Neural ordinary differential equations as bodies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError, ConvergenceError
from opteq.models.parts import known
from opteq.options import check, check_flag, check_positive, is_whole

_MOST_STEPS = 1000


class Field(nn.Sequential):
    """`f(z)`: 1×1, 3×3 and 1×1 convolutions with ReLU between them."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, 1),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(filters, channels, 1),
        )

    def forward(self, t: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        """The derivative at time `t`, on which it does not depend."""
        return super().forward(z)


class NeuralODE(nn.Module):
    """`z(1)` for `dz/dt = f(z)`, `z(0) = x` (Chen et al. 2018), by Dormand and Prince's method of order 5.

    With `extra` channels, zero at first, it is an augmented neural ODE (Dupont et al. 2019):
    `(batch, channels, h, w) ↦ (batch, channels + extra, h, w)`. Needs the package torchdiffeq. Its step
    size follows the error of the whole batch, so that a prediction depends on its batch mates, within `tol`.

    Args:
        channels: channels of the features.
        filters: channels within `f`.
        extra: channels that are added.
        tol: relative and absolute tolerance of a step.
        adjoint: take gradients from the adjoint equation, in constant memory, in place of backpropagation
            through the steps.

    Raises:
        ConfigError: for numbers out of range; when called, without torchdiffeq.
    """

    def __init__(
        self,
        channels: int | None = None,
        filters: int = 64,
        extra: int = 0,
        tol: float = 1e-3,
        adjoint: bool = False,
    ) -> None:
        super().__init__()
        check(is_whole(extra) and extra >= 0, "extra", extra, "a whole number of at least 0")
        check_positive("tol", tol)
        check_flag("adjoint", adjoint)
        self.extra, self.tol, self.adjoint = extra, tol, adjoint
        self.field = Field(known("channels", channels) + extra, known("filters", filters))

    def forward(self, x: Tensor) -> Tensor:
        """Raises a `ConvergenceError` where the method needs more than 1000 steps."""
        try:
            import torchdiffeq  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError(
                "Neural ODEs need the package torchdiffeq: pip install 'opteq[rivals]'."
            ) from error
        methods: Any = torchdiffeq
        integrate = methods.odeint_adjoint if self.adjoint else methods.odeint
        start = torch.cat([x, x.new_zeros(len(x), self.extra, *x.shape[2:])], 1)
        times = torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device)
        options = {"max_num_steps": _MOST_STEPS}
        try:
            return integrate(
                self.field, start, times, rtol=self.tol, atol=self.tol, method="dopri5", options=options
            )[1]
        except AssertionError as error:
            raise ConvergenceError(
                f"The differential equation could not be solved to tol={self.tol:g} ({error}); raise `tol`,"
                " or lower the learning rate if it happens in training."
            ) from error

    def extra_repr(self) -> str:
        return f"extra={self.extra}, tol={self.tol}, adjoint={self.adjoint}"
