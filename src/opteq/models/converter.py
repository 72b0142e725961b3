"""Feed-forward networks as deep OptEq models with the same output."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from opteq.activations import Activation, Identity, of_module
from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.chain import ChainEquation
from opteq.maps.deep import DeepOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.operators.norms.base import Weights
from opteq.options import check_kind
from opteq.solvers.picard import Picard

_PASSED_OVER = nn.Dropout | nn.Dropout2d | nn.Identity
_KEPT_IN_HEAD = (
    nn.Linear
    | nn.Conv2d
    | nn.Flatten
    | nn.AvgPool2d
    | nn.AdaptiveAvgPool2d
    | nn.MaxPool2d
    | nn.AdaptiveMaxPool2d
)


class Slots(LinearOperator):
    """`W z = A z[read] + z[own]` on a state whose channels are divided into slots, one per layer.

    For slots of their own, `W_l W_{l-1}ᵀ = A_l`: what layer `l-1` writes, `W_{l-1}ᵀh`, layer `l` reads
    as `A_l h`. That turns a feed-forward layer into an OptEq unit (Xie et al. 2022, Lemma 1). Scaling
    `A` does not scale `W`, so a `max_norm` cannot be imposed on units with such a `W`.

    Args:
        channels: channels of the whole state.
        sides: names of the dimensions after the channels.
        own: the slot that the layer writes to.
        read: the slot of the layer before; None for a layer that reads nothing.
        operator: `A`, between those slots; None together with `read`.
    """

    def __init__(
        self,
        channels: int,
        sides: tuple[str, ...],
        own: slice,
        read: slice | None = None,
        operator: LinearOperator | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.sides = channels, own.stop - own.start, sides
        self.own, self.read, self.operator = own, read, operator

        self.weight_count = 0 if operator is None else operator.weight_count

    @property
    def weights(self) -> Weights:
        return () if self.operator is None else self.operator.weights

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundSlots:
        inner = None
        if self.operator is not None and self.read is not None:
            part = (self.read.stop - self.read.start, *domain[1:])
            inner = self.operator.act(weights, part, error)
        return BoundSlots(weights, domain, error, self._memo, self.own, self.read, inner)


@dataclass(frozen=True, eq=False)
class BoundSlots(BoundOperator):
    """`z ↦ A z[read] + z[own]`, with `A` as `inner`."""

    own: slice
    read: slice | None
    inner: BoundOperator | None

    def __call__(self, x: Tensor) -> Tensor:
        own = x[:, self.own]
        return own.clone() if self.inner is None else own + self.inner(x[:, self.read])

    def adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(len(y), self.domain[0], *y.shape[2:])
        x[:, self.own] = y
        if self.inner is not None:
            x[:, self.read] = self.inner.adjoint(y)
        return x

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        if self.inner is None:
            return ()
        return self.inner.weight_gradient(*((x[:, self.read], y) for x, y in pairs))

    def with_tensors(self, tensors: Weights) -> Self:
        inner = None if self.inner is None else self.inner.with_tensors(tensors)
        return replace(self, tensors=tensors, inner=inner)

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.own.stop - self.own.start, *self.domain[1:])

    def quick_norm_bound(self) -> Tensor:
        """`√(1 + ‖A‖²)`, since `WWᵀ = I + AAᵀ`."""
        if self.inner is None:
            return torch.ones((), dtype=torch.float64)
        return (1 + self.inner.quick_norm_bound().square()).sqrt()


class Nothing(nn.Module):
    """`U = 0`: the injection of a layer that sees the input through its predecessors only.

    Args:
        channels: of the zeros.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.channels, *x.shape[2:])

    def lipschitz(self, x: Tensor) -> float:
        """The constant of a constant map."""
        return 0.0


def from_feedforward(network: nn.Module) -> ConvertedClassifier:
    """A deep OptEq with the outputs of a feed-forward network (Xie et al. 2022, Lemma 2).

    The network is an `nn.Sequential`, nested if you like, of

    - an optional `Flatten`,
    - layers, all of them `Linear` or all of them `Conv2d` of stride 1 that keep height and width, each
      with an activation (none means the identity): ReLU, LeakyReLU, ELU, Tanh, Sigmoid, Softplus,
      Softshrink or Hardtanh,
    - after the last activation, a head of `Flatten`, pooling, `Linear` and `Conv2d`, kept as it is.

    Each layer `h_l = σ_l(A_l h_{l-1} + b_l)` becomes a unit with `α = 1` whose `W_l` reads slot `l-1` of
    the state through `A_l` and its own slot as it is, so that `W_l W_{l-1}ᵀ = A_l`. The first layer
    reads the input alone: `U_1 = A_1`. A unit on a slot of its own, before all others, forgets the
    state, so that `T` does not depend on `z` and its equilibrium is reached in one evaluation, however
    large the norms; for norms above 1 the units are no proximal operators.

    The weights are copied and can be trained. Dropout is passed over, as in eval mode.

    Raises:
        ConfigError: if a part cannot be converted; the message names it.
    """
    check_kind(nn.Module, "network", network, "a torch module")
    stem, layers, head = _read(network)
    sides = layers[0].operator.sides
    widths = [1, *(layer.operator.out_channels for layer in layers)]
    ends = list(accumulate(widths))
    slots = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
    state = ends[-1]

    forget = OptEqUnit(Slots(state, sides, slots[0]), Nothing(1), bias=False, max_norm=None)
    units = [forget]
    for index, layer in enumerate(layers, start=1):
        if index == 1:
            W, U = Slots(state, sides, slots[1]), layer.operator
        else:
            W = Slots(state, sides, slots[index], slots[index - 1], layer.operator)
            U = Nothing(widths[index])
        unit = OptEqUnit(W, U, layer.activation, bias=False, max_norm=None)
        unit.injection.bias = layer.bias
        unit.norm_checked = True  # the equilibrium exists whatever the norms
        units.append(unit)
    equilibrium = EquilibriumLayer(DeepOptEq(units, alpha=1.0), Picard())
    return ConvertedClassifier(stem, equilibrium, slots[1:], head).train(network.training)


class ConvertedClassifier(nn.Module):
    """A deep OptEq that computes what a feed-forward network does; see `from_feedforward`.

    Attributes:
        stem: what came before the first layer.
        equilibrium: the equilibrium layer.
        slots: the channels of its state that belong to each layer of the network.
        head: what came after the last activation.
    """

    def __init__(
        self, stem: nn.Module, equilibrium: EquilibriumLayer, slots: list[slice], head: nn.Module
    ) -> None:
        super().__init__()
        self.stem, self.equilibrium, self.slots, self.head = stem, equilibrium, slots, head

    @property
    def equilibrium_layers(self) -> list[EquilibriumLayer]:
        """The one equilibrium layer."""
        return [self.equilibrium]

    def hidden_units(self, x: Tensor) -> list[Tensor]:
        """States of the hidden-unit form `z_k = W_kᵀσ(W_k z_{k-1} + c_k)` (Xie et al. 2022, Lemma 1).

        One per layer of the network, whose activation is in `z_k[:, slots[k]]`; the last state is the
        equilibrium.
        """
        equation = self.equilibrium.bind(self.stem(x))
        assert isinstance(equation, ChainEquation)
        *states, start = equation.blocks(equation.initial())
        # The first unit only forgets.
        return [*states[1:], equation(start)]

    def features(self, x: Tensor) -> Tensor:
        """The activations of the network's last layer."""
        return self.equilibrium(self.stem(x))[:, self.slots[-1]]

    def forward(self, x: Tensor) -> Tensor:
        """The output of the network."""
        return self.head(self.features(x))


@dataclass(frozen=True)
class _Layer:
    """`h ↦ σ(A h + b)`."""

    operator: Dense | Conv2d
    bias: nn.Parameter | None
    activation: Activation


def _read(network: nn.Module) -> tuple[nn.Module, list[_Layer], nn.Module]:
    """Stem, layers and head of a network; the layers as copies."""
    if any(is_lazy(parameter) for parameter in network.parameters()):
        raise ConfigError("Expected a network that knows its shapes; run its lazy modules on an input first.")
    parts = [(name, part) for name, part in _parts(network) if not isinstance(part, _PASSED_OVER)]
    last = max((i for i, (_, part) in enumerate(parts) if _activation(part)), default=None)
    if last is None:
        raise ConfigError(
            "Expected a torch.nn.Sequential of Linear or Conv2d layers with activations,"
            f" got a {type(network).__name__} without an activation that can be converted."
        )
    head = [copy.deepcopy(part) for _, part in parts[last + 1 :]]
    for name, part in parts[last + 1 :]:
        if not isinstance(part, _KEPT_IN_HEAD):
            raise _refusal(
                name, part, "after the last activation there may be Flatten, pooling, Linear and Conv2d"
            )
    trunk = parts[: last + 1]
    stem = nn.Sequential()
    if isinstance(trunk[0][1], nn.Flatten):
        stem.append(copy.deepcopy(trunk.pop(0)[1]))
    return stem, _read_layers(trunk), nn.Sequential(*head)


def _read_layers(trunk: list[tuple[str, nn.Module]]) -> list[_Layer]:
    layers: list[_Layer] = []
    previous: nn.Module = nn.Identity()
    # Padded, so that the last part has a successor as well.
    for (name, part), (_, following) in pairwise([*trunk, ("", nn.Identity())]):
        if isinstance(part, nn.Linear | nn.Conv2d):
            operator = _operator(name, part)
            if layers and type(layers[-1].operator) is not type(operator):
                raise _refusal(
                    name,
                    part,
                    "the layers before the last activation must be all Linear or all Conv2d, because they"
                    " share one state",
                )
            if layers and layers[-1].operator.out_channels != operator.in_channels:
                raise _refusal(name, part, f"{layers[-1].operator.out_channels} channels come before it")
            bias = None if part.bias is None else nn.Parameter(part.bias.detach().clone())
            layers.append(_Layer(operator, bias, _activation(following) or Identity()))
        elif not (_activation(part) and isinstance(previous, nn.Linear | nn.Conv2d)):
            is_norm = isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)
            raise _refusal(
                name,
                part,
                "before the last activation there may be Linear or Conv2d layers, each followed by at most"
                " one monotone activation with slopes up to 1"
                + ("; see torch.nn.utils.fuse_conv_bn_eval" if is_norm else ""),
            )
        previous = part
    return layers


def _operator(name: str, layer: nn.Linear | nn.Conv2d) -> Dense | Conv2d:
    """The layer without its bias, as an opteq operator."""
    with torch.device("meta"):  # the initial weights, and the random numbers for them, are not wanted
        if isinstance(layer, nn.Linear):
            operator = Dense(layer.in_features, layer.out_features)
        else:
            size = layer.kernel_size[0]
            half = (size // 2, size // 2)
            keeps_size = layer.stride == layer.dilation == (1, 1) and layer.padding in ("same", half)
            centred = layer.kernel_size == (size, size) and size % 2 and layer.padding_mode == "zeros"
            if not (keeps_size and centred):
                raise _refusal(
                    name,
                    layer,
                    "a Conv2d needs an odd square kernel, stride 1, no dilation and zero padding that keeps"
                    " height and width",
                )
            operator = Conv2d(layer.in_channels, layer.out_channels, size, layer.groups)
    operator.weight = nn.Parameter(layer.weight.detach().clone())
    return operator


def _activation(module: nn.Module) -> Activation | None:
    return None if isinstance(module, nn.Identity) else of_module(module)


def _parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that a network applies in turn, with their names."""
    if isinstance(module, nn.Sequential):
        # named_children() would leave out a module, such as an activation, that occurs once more.
        for key, child in zip(module._modules, module, strict=True):
            yield from _parts(child, f"{name}.{key}" if name else key)
    else:
        yield name, module


def _refusal(name: str, part: nn.Module, reason: str) -> ConfigError:
    return ConfigError(f"Cannot convert layer {name} ({part}): {reason}.")
