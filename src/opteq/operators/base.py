"""Linear operators: modules that hold the weights of a linear map, and the way its norm is kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.operators.bound import BoundOperator, NormMemo
from opteq.operators.estimate import NormEstimate
from opteq.operators.norms.base import NormControl, Weights
from opteq.operators.norms.ceiling import Ceiling
from opteq.options import check_kind
from opteq.overrides import definer, known_class, overridden

# Times the ceiling: from where the norm of a stored weight is brought down, and to what: above it,
# since the estimate is from below.
_LARGEST_EXCESS, _SETTLED_EXCESS = 1.5, 1.2


class LinearOperator(nn.Module, ABC):
    """The parameters of a linear map `W`. It knows no input: `bind` gives the map for one shape.

    As a module, `W(x)`, it is the map with the norm that the weights have, with all hooks of a module. Within
    an equilibrium map `W` is bound once for a whole solve: forward pre-hooks and parametrizations, such as
    those of `torch.nn.utils.prune` and `weight_norm`, run then; forward hooks have no call to look at.

    Args:
        norm: the way that `‖W‖₂` is kept below the ceiling of a map, see `opteq.operators.norms`.
    """

    in_channels: int
    out_channels: int
    sides: tuple[str, ...] = ()
    """Names of the dimensions after the channels: none for vectors, height and width for images."""
    weight_count: int = 1
    """How many `weights` there are."""

    def __init__(self, norm: NormControl | None = None) -> None:
        super().__init__()
        norm = Ceiling() if norm is None else norm
        self.norm_control = check_kind(NormControl, "norm", norm, "a way such as AlmostOrthogonal()")
        # All of it is derived from the weights, so nothing of it is saved or copied with them.
        self._estimate, self._acting, self._memo = NormEstimate(), NormEstimate(), NormMemo()
        self._ceiling = math.inf

    @property
    def weights(self) -> Weights:
        """The weights before they are scaled to a ceiling, by default one, from the parameter `weight`."""
        return (self.norm_control.weight(self),)

    @abstractmethod
    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundOperator:
        """The map with these weights, on inputs of shape `domain`."""

    def bind(
        self, domain: tuple[int, ...], ceiling: float | None = None, error: float = 0.0
    ) -> BoundOperator:
        """The map on inputs of shape `domain`, for one solve and attached to the autograd graph.

        Args:
            domain: shape of the inputs, without the batch.
            ceiling: `ζ ≥ ‖W‖₂` that is to be kept; None for none.
            error: the relative rounding error that is allowed to products, such as the tolerance of a solve.

        Raises:
            ConfigError: for a forward pre-hook that asks for an input, or changes it, and for the hooks with
                which Opacus collects gradients sample by sample.
        """
        for module in self.modules():
            if isinstance(module, LinearOperator):
                _refuse_sample_gradients(module)
                _run_pre_hooks(module)
        self._ceiling = math.inf if ceiling is None else ceiling
        return self._bound(domain, ceiling, error)

    def forward(self, x: Tensor, error: float = 0.0) -> Tensor:
        """`W x`.

        Raises:
            ShapeError: if the channels of `x` do not fit.
        """
        self.check_input(x)
        return self._bound(tuple(x.shape[1:]), None, error)(x)

    def norm(self, domain: tuple[int, ...], ceiling: float | None = None) -> Tensor:
        """An estimate of `‖W‖₂`, as it acts where a map asks for `ceiling`, see `NormEstimate`."""
        if ceiling is None:
            return self._norm(self._bound(domain, None, 0.0))
        kept = self.kept_norm(ceiling)
        if kept < math.inf:
            size = self.norm(domain)
            if self.weight_count:
                (size,) = self.norm_control.scaled((size,), ceiling, lambda: size)
            return size.clamp(max=kept)
        # What a way makes of the weights of somebody else's operator is only known from what then acts.
        return self._acting(self._bound(domain, ceiling, 0.0), self.training)

    def kept_norm(self, ceiling: float | None) -> float:
        """What `‖W‖₂` is kept below where a map asks for `ceiling`; infinite where nothing keeps it."""
        # Somebody else's subclass, of the operator or of the way, may compute what it likes from the weights.
        control = self.norm_control
        says = definer(type(control), "certified" if control.certified else "kept")
        if overridden(self, known_class(self)) or overridden(control, says, ("forgets_size", "install")):
            return math.inf
        # There is nothing to scale where there are no weights.
        if not self.weight_count:
            return 1.0 if control.certified else math.inf
        return control.kept(ceiling)

    def check_input(self, x: Tensor, name: str = "x") -> None:
        """Raise a `ShapeError` unless `x` is a batch of elements of the domain."""
        tensor = isinstance(x, Tensor)
        if not tensor or x.dim() != 2 + len(self.sides) or x.shape[1] != self.in_channels:
            shape = ", ".join(("batch", str(self.in_channels), *self.sides))
            got = tuple(x.shape) if tensor else type(x).__name__
            raise ShapeError(f"Expected `{name}` of shape ({shape}), got {got}.")

    def _bound(self, domain: tuple[int, ...], ceiling: float | None, error: float) -> BoundOperator:
        control, weights = self.norm_control, self.weights
        scaled = control.scaled(weights, ceiling, lambda: self._norm(self.act(weights, domain, 0.0)))
        if weights and weights[0].dtype in (torch.float32, torch.float64) and self.kept_norm(None) <= 1:
            self._memo.promise(scaled, self.kept_norm(ceiling))
        return self.act(scaled, domain, error)

    def _norm(self, bound: BoundOperator) -> Tensor:
        return self._estimate(bound, self.training)

    def _excess(self) -> float:
        """How many times its ceiling the norm was when it was last asked for."""
        value = self._estimate.value
        if value is None or not self.norm_control.forgets_size:
            return 0.0
        return value.item() / self._ceiling

    def _fresh(self) -> dict:
        return {"_estimate": NormEstimate(), "_acting": NormEstimate(), "_memo": NormMemo()}

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), **self._fresh()}  # type: ignore[misc]


class _NoInput(tuple):
    """The arguments of a call that there is not."""


def _run_pre_hooks(operator: LinearOperator) -> None:
    """Run what sets the weights anew before each use, as pruning and the older `weight_norm` do."""
    name = type(operator).__name__
    trace = torch._C._get_tracing_state()
    scope = trace.current_scope() if trace else ""
    for key, hook in operator._forward_pre_hooks.items():
        # Of a type of its own: what a hook makes of no input at all is an empty tuple too.
        given = _NoInput()
        arguments = (given, {}) if key in operator._forward_pre_hooks_with_kwargs else (given,)
        try:
            answer = hook(operator, *arguments)
        except (IndexError, KeyError, ValueError) as error:
            raise ConfigError(
                f"A forward pre-hook of {name} looks at an input, but `W` has none: it is bound once for a"
                " whole solve. Hook the layer or `U` instead."
            ) from error
        # A tracer, such as fvcore's, opens a scope that its forward hook would close.
        while trace and trace.current_scope() != scope:
            trace.pop_scope()
        args = answer[0] if len(arguments) == 2 and isinstance(answer, tuple) and answer else answer
        if args is not None and args is not given:
            raise ConfigError(
                f"A forward pre-hook of {name} changes its input, but `W` has none: it is bound once for a"
                " whole solve. Hook the layer or `U` instead."
            )


def _refuse_sample_gradients(operator: LinearOperator) -> None:
    """Refuse hooks of Opacus, which would see no call and leave a weight without gradients in silence."""
    for hook in operator._forward_hooks.values():
        if getattr(hook, "__module__", "").partition(".")[0] == "opacus":
            raise ConfigError(
                "Opacus collects the gradients of each sample at the calls of a module, but `W`, a"
                f" {type(operator).__name__}, is bound once for a whole solve of an equilibrium; freeze it by"
                " W.requires_grad_(False) before the model is wrapped, or train without Opacus."
            )


def forget_norms(module: nn.Module) -> None:
    """Let go of the norms that were estimated, so that the next ones depend on the weights alone.

    In training an estimate follows the weights in a few steps, and so depends on earlier ones.
    """
    for operator in module.modules():
        if isinstance(operator, LinearOperator):
            vars(operator).update(operator._fresh())


def share_norm_bounds(module: nn.Module, copied: nn.Module) -> None:
    """Let a copy of a module have the bounds on norms that the module has, and the other way round.

    They are looked up by the weights, so that each finds its own. Operators of others, which may compute by
    more than their weights, keep theirs to themselves.
    """
    for operator, other in zip(module.modules(), copied.modules(), strict=False):
        if not isinstance(operator, LinearOperator) or not isinstance(other, LinearOperator):
            continue
        if type(operator) is type(other) is known_class(operator):
            other._memo = operator._memo


@torch.no_grad()
def settle_norms(module: nn.Module) -> None:
    """Scale stored weights whose norm has grown to half as much again as their ceiling back to near it.

    Under a `Ceiling` the direction of a large weight alone counts, and nothing keeps its size from growing,
    which slows its training down. The function stays what it is, for images of the size that was seen last.
    Call it between a step of an optimizer and the next forward pass, with the whole network, as `opteq fit`
    does: weights that were used since the step are left alone, as a graph may hold them, and so are those
    that a second part of `module` shares.
    """
    check_kind(nn.Module, "module", module, "a torch module")
    for operator in module.modules():
        if not isinstance(operator, LinearOperator) or operator._excess() <= _LARGEST_EXCESS:
            continue
        weights = operator.weights
        # What is computed from parameters is for others to scale.
        if isinstance(weights[0], nn.Parameter) and not operator._estimate.knows(weights):
            places = [p for _, p in module.named_parameters(remove_duplicate=False) if p is weights[0]]
            # The step may have changed the norm; below the ceiling a scale would change the function.
            norm = operator.norm(operator._estimate.domain).item()
            wanted = _SETTLED_EXCESS * operator._ceiling
            if len(places) == 1 and norm > wanted:
                weights[0].mul_(wanted / norm)
