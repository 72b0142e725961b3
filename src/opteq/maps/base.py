"""The interface of equilibrium maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opteq.equation import Equation
from opteq.errors import ConfigError, ShapeError
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.options import check, check_flag, check_kind, is_number
from opteq.results import State
from opteq.tensors.tracing import transforming


class EquilibriumMap(nn.Module, ABC):
    """The parameters of `T(z; x)`. It knows no input: `bind` gives the equation for one."""

    @abstractmethod
    def bind(self, x: State, error: float = 0.0) -> Equation:
        """The equation `z = T(z; x)` for a batch of inputs, attached to the autograd graph.

        Args:
            x: the inputs.
            error: the relative rounding error that is allowed to products, which operators are bound with:
                the tolerance of a solve, 0 for certificates.

        Raises:
            ShapeError: if `x` does not fit.
        """

    @property
    def title(self) -> str:
        """What it is called in summaries and reports."""
        return type(self).__name__

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        """What reads `x`, in the order in which `rates` of the equation ask for their Lipschitz constants.

        Whoever overrides `bind` says anew what reads its input.

        Raises:
            ConfigError: where `x` enters in other ways as well.
        """
        raise ConfigError(f"No Lipschitz bound is known for {type(self).__name__}.")


def expect_map(map: object) -> None:
    """Raise a `ConfigError` unless `map` is an equilibrium map."""
    check_kind(EquilibriumMap, "map", map, "an equilibrium map such as OptEqUnit(W, U)")


def bind_single(map: EquilibriumMap, x: State, error: float) -> tuple[Equation, Tensor]:
    """The equation of a map for `x`, and its initial state, for those who need a state of one tensor.

    Raises:
        ConfigError: if the state has several branches.
    """
    equation = map.bind(x, error)
    start = equation.initial()
    if not isinstance(start, Tensor):
        raise ConfigError(
            f"Expected a map whose state is one tensor, got a {type(map).__name__}, whose state has"
            f" {len(start)} branches; change its parts instead."
        )
    return equation, start


class Injection(nn.Module):
    """`c = U x + b`, in the layout and dtype that equations iterate in.

    Args:
        operator: `U`, an opteq operator (needed for Lipschitz certificates) or any module.
        channels: what `U` must produce.
        bias: whether there is a `b`, one number per channel.

    Raises:
        ConfigError: if an opteq operator produces another number of channels, or `bias` is no truth value.
    """

    def __init__(self, operator: nn.Module, channels: int, bias: bool) -> None:
        super().__init__()
        check_kind(nn.Module, "U", operator, "an opteq operator or a torch module")
        if isinstance(operator, LinearOperator) and operator.out_channels != channels:
            raise ConfigError(
                f"Expected `U` to produce the {channels} channels that `W` produces,"
                f" got {operator.out_channels}."
            )
        check_flag("bias", bias)
        self.operator, self.channels = operator, channels
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: State, error: float = 0.0) -> Tensor:
        c = inject(self.operator, x, error)
        if c.dim() < 2 or c.shape[1] != self.channels:
            raise ShapeError(f"Expected `U` to give (batch, {self.channels}, ...), got {tuple(c.shape)}.")
        if self.bias is not None:
            c = c + self.bias.view(-1, *[1] * (c.dim() - 2))
        return fast_layout(c)


def inject(operator: nn.Module, x: State, error: float) -> Tensor:
    """`U x`, in the dtype that equations iterate in.

    The rounding `error` that is allowed is for opteq's operators: modules of others compute as they do.

    Raises:
        ShapeError: if `x`, or what the operator makes of it, is not one tensor.
    """
    if not isinstance(x, Tensor):
        raise ShapeError(f"Expected `x` to be one tensor, got {type(x).__name__}.")
    c = operator(x, error=error) if isinstance(operator, LinearOperator) else operator(x)
    if not isinstance(c, Tensor):
        raise ShapeError(f"Expected `U` to give one tensor, got {type(c).__name__}.")
    # Under autocast the operators run in low precision, the state does not.
    if torch.is_autocast_enabled(c.device.type) and c.dtype in (torch.bfloat16, torch.float16):
        c = c.float()
    return c


def fast_layout(x: Tensor) -> Tensor:
    """`x` in the memory layout in which convolutions run fastest: channels last for images on a CPU."""
    # The tensors of torch.func know no such layout.
    if x.dim() == 4 and x.device.type == "cpu" and not transforming():
        return x.contiguous(memory_format=torch.channels_last)
    return x


def expect_operator(operator: object, name: str) -> None:
    """Raise a `ConfigError` unless `operator` is an opteq operator."""
    if not isinstance(operator, LinearOperator):
        kind = type(operator)
        raise ConfigError(
            f"Expected an opteq operator such as opteq.Conv2d for `{name}`,"
            f" got {kind.__module__}.{kind.__name__}."
        )


def check_max_norm(max_norm: object) -> None:
    """Raise a `ConfigError` unless `max_norm` is a ceiling on a norm or None."""
    positive = is_number(max_norm) and max_norm > 0
    check(max_norm is None or positive, "max_norm", max_norm, "positive or None")


def check_branches(branches: object) -> None:
    """Raise a `ConfigError` unless `branches` is a list of at least one map."""
    for number, branch in enumerate(expect_list(branches, "branch", "branches"), start=1):
        if not isinstance(branch, EquilibriumMap):
            got = f"the class {branch.__name__}" if isinstance(branch, type) else type(branch).__name__
            raise ConfigError(f"Expected branch {number} to be an EquilibriumMap, got {got}.")


def expect_list(values: object, one: str, several: str) -> Sequence[Any]:
    """`values`, or a `ConfigError` unless they are a list that is not empty."""
    if not isinstance(values, Sequence | nn.ModuleList):
        raise ConfigError(f"Expected a list of {several}, got {type(values).__name__}.")
    if not len(values):
        raise ConfigError(f"Expected at least one {one}.")
    return values  # type: ignore[return-value]


def bind_to(
    operator: LinearOperator, injection: Tensor, ceiling: float | None, error: float
) -> BoundOperator:
    """`W`, bound on states whose image is like `injection`.

    Raises:
        ShapeError: if the operator does not keep the spatial size, or needs one that there is not.
    """
    if injection.dim() != 2 + len(operator.sides):
        expected = ", ".join(("batch", str(operator.out_channels), *operator.sides))
        raise ShapeError(f"Expected `U` to give ({expected}) as `W` does, got {tuple(injection.shape)}.")
    bound = operator.bind((operator.in_channels, *injection.shape[2:]), ceiling, error)
    if bound.codomain != tuple(injection.shape[1:]):
        raise ShapeError(
            f"Expected `W` to produce {tuple(injection.shape[1:])} as `U` does, got {bound.codomain}."
        )
    return bound
