"""Feed-forward networks as deep OptEq models with the same output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opteq.activations import Activation
from opteq.errors import ShapeError
from opteq.layer import EquilibriumLayer
from opteq.maps.chain import ChainEquation
from opteq.maps.deep import DeepOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.models.feedforward import Shape, kept_shapes, read_layers, shapes_for
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.norms.base import Weights
from opteq.options import check_kind
from opteq.solvers.picard import Picard


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
        linear: `A`, a linear module between those slots, whose entries are of one sign where it has no
            weights; None together with `read`.
    """

    def __init__(
        self,
        channels: int,
        sides: tuple[str, ...],
        own: slice,
        read: slice | None = None,
        linear: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.sides = channels, own.stop - own.start, sides
        self.own, self.read, self.linear = own, read, linear
        self.weight_count = len(self.weights)

    @property
    def weights(self) -> Weights:
        return () if self.linear is None else tuple(self.linear.parameters())

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundSlots:
        return BoundSlots(weights, domain, error, self._memo, self.own, self.read, self.linear)


@dataclass(frozen=True, eq=False)
class BoundSlots(BoundOperator):
    """`z ↦ A z[read] + z[own]`, with the `tensors` in place of the weights of `linear`, the module of `A`."""

    own: slice
    read: slice | None
    linear: nn.Module | None

    def __call__(self, x: Tensor) -> Tensor:
        own = x[:, self.own]
        return own.clone() if self.read is None else own + self._apply(x[:, self.read])

    def adjoint(self, y: Tensor) -> Tensor:
        x = y.new_zeros(len(y), self.domain[0], *y.shape[2:])
        x[:, self.own] = y
        if self.read is not None:
            x[:, self.read] = self._transposed(y)
        return x

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        if not self.tensors:
            return ()

        leaves = tuple(t.detach().requires_grad_() for t in self.tensors)
        with torch.enable_grad():
            images = [self.with_tensors(leaves)._apply(x[:, self.read].detach()) for x, _ in pairs]
        return torch.autograd.grad(images, leaves, [y for _, y in pairs])

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.own.stop - self.own.start, *self.domain[1:])

    def quick_norm_bound(self) -> Tensor:
        """`√(1 + rc)`, since `WWᵀ = I + AAᵀ`, and `‖A‖² ≤ rc` by the Schur test.

        `r` and `c` are the largest sums of a row and of a column of a matrix that is at least `|A|`: that of
        the magnitudes of the weights.
        """
        if self.read is None:
            return torch.ones((), dtype=torch.float64)
        magnitudes = self.with_tensors(tuple(t.double().abs() for t in self.tensors))
        device = self.tensors[0].device if self.tensors else None
        ones = torch.ones(1, *self._read_shape, dtype=torch.float64, device=device)
        rows = magnitudes._apply(ones)
        columns = magnitudes._transposed(torch.ones_like(rows))
        return (1 + rows.max() * columns.max()).sqrt() * (1 + 1e-12)

    @property
    def _read_shape(self) -> tuple[int, ...]:
        assert self.read is not None
        return (self.read.stop - self.read.start, *self.domain[1:])

    def _apply(self, h: Tensor) -> Tensor:
        """`A h`."""
        assert self.linear is not None
        names = (name for name, _ in self.linear.named_parameters())
        return functional_call(self.linear, dict(zip(names, self.tensors, strict=True)), (h,))

    def _transposed(self, y: Tensor) -> Tensor:
        """`Aᵀ y`, the derivative of `⟨y, A h⟩`."""
        recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            h = y.new_zeros(len(y), *self._read_shape).requires_grad_()
            image = self._apply(h)
            # Autocast may make it of another dtype.
            return torch.autograd.grad(image, h, y.to(image.dtype), create_graph=recorded)[0]


class Constant(nn.Module):
    """`U x = b`: the injection of a layer that sees the input through its predecessors only.

    Args:
        shape: of what the layer gives.
        bias: `b`, one number per channel, or along the last dimension; None for zeros.
        last: whether it is along the last dimension, as in `nn.Linear`.
    """

    def __init__(self, shape: Shape, bias: nn.Parameter | None = None, last: bool = False) -> None:
        super().__init__()
        self.shape, self.bias, self.last = shape, bias, last

    def forward(self, x: Tensor) -> Tensor:
        sizes = (x.shape[place] if n is None else n for place, n in enumerate(self.shape, start=1))
        zeros = x.new_zeros(len(x), *sizes)
        if self.bias is None:
            return zeros
        return zeros + (self.bias if self.last else self.bias.view(-1, *[1] * (len(self.shape) - 1)))

    def lipschitz(self, x: Tensor) -> float:
        """The constant of a constant map."""
        return 0.0


def from_feedforward(network: nn.Module, x: Tensor | None = None) -> ConvertedClassifier:
    """A deep OptEq with the outputs of a feed-forward network in eval mode (Xie et al. 2022, Lemma 2).

    The network is an `nn.Sequential`, nested if you like, of

    - affine layers: `Linear`, `Conv2d` and `ConvTranspose2d` with all of their options, batch norm in eval
      mode, average pooling, zero, reflection, replication and circular padding, `Flatten` and `Unflatten`,
    - activations: ReLU, LeakyReLU, ELU, Tanh, Sigmoid, Softplus, Softshrink or Hardtanh,
    - a head, after the last activation: affine layers and max pooling. It is kept as it is. A network without
      activations has none; its layers are converted.

    Each layer `h_l = σ_l(A_l h_{l-1} + b_l)` becomes a unit with `α = 1` whose `W_l` reads slot `l-1` of
    the state through `A_l` and its own slot as it is, so that `W_l W_{l-1}ᵀ = A_l`. The first layer
    reads the input alone: `U_1 = A_1`. A unit on a slot of its own, before all others, forgets the
    state, so that `T` does not depend on `z` and its equilibrium is reached in one evaluation, however
    large the norms; for norms above 1 the units are no proximal operators.

    The weights are copied and can be trained; a batch norm becomes a learned scale and shift of each channel.

    Args:
        network: the network, in eval mode if it has dropout or batch norm.
        x: an input, of which only the shape matters. With it the state is a vector, and inputs are of that
            shape. Without, images may be of any size, and all layers, up to the last activation, have to be
            `Linear`, or all of them `Conv2d` that keep height and width, each with or without a batch norm
            and an activation. A `Flatten` may come before the first `Linear`.

    Raises:
        ConfigError: if a part cannot be converted; the message names it.
    """
    check_kind(nn.Module, "network", network, "a torch module")
    layers, head = read_layers(network)
    shapes = kept_shapes(layers) if x is None else shapes_for(layers, x)
    # A vector, or the sides of the input: what the state has behind its channels.
    flat, kept = x is not None, () if x is not None else shapes[0][1:]
    widths = [1, *(math.prod(shape) if flat else shape[0] for shape in shapes)]  # type: ignore[arg-type]
    ends = list(accumulate(widths))
    slots = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
    state, sides = ends[-1], ("H", "W")[: len(kept)]

    units = [_unit(Slots(state, sides, slots[0]), Constant((1, *kept)))]
    for index, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        modules = layer.modules
        flattened = [nn.Flatten()] if flat else []
        if index == 0:
            W, U = Slots(state, sides, slots[1]), nn.Sequential(*modules, *flattened)
        else:
            constant = Constant(shape, *_without_bias(modules[-1]))
            unflattened = [nn.Unflatten(1, shapes[index - 1])] if flat else []  # type: ignore[arg-type]
            linear = nn.Sequential(*unflattened, *modules, *flattened)
            W = Slots(state, sides, slots[index + 1], slots[index], linear)
            U = nn.Sequential(constant, *flattened)
        units.append(_unit(W, U, layer.activation))
    equilibrium = EquilibriumLayer(DeepOptEq(units, alpha=1.0), Picard())
    features = shapes[-1] if flat else shapes[-1][:1]
    inputs = tuple(x.shape[1:]) if x is not None else None
    converted = ConvertedClassifier(equilibrium, slots[1:], features, head, inputs)  # type: ignore[arg-type]
    return converted.train(network.training)


class ConvertedClassifier(nn.Module):
    """A deep OptEq that computes what a feed-forward network does; see `from_feedforward`.

    Attributes:
        equilibrium: the equilibrium layer, on what the network takes.
        slots: the channels of its state that belong to each layer of the network.
        head: what came after the last activation.
        inputs: the shape of an input, without the batch; None where images may be of any size.
    """

    def __init__(
        self,
        equilibrium: EquilibriumLayer,
        slots: list[slice],
        shape: tuple[int, ...],
        head: nn.Module,
        inputs: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        self.equilibrium, self.slots, self.head, self.inputs = equilibrium, slots, head, inputs
        self._shape = shape  # what the channels of the last slot are to the head

    @property
    def equilibrium_layers(self) -> list[EquilibriumLayer]:
        """The one equilibrium layer."""
        return [self.equilibrium]

    def hidden_units(self, x: Tensor) -> list[Tensor]:
        """States of the hidden-unit form `z_k = W_kᵀσ(W_k z_{k-1} + c_k)` (Xie et al. 2022, Lemma 1).

        One per layer of the network, whose activation is in `z_k[:, slots[k]]`; the last state is the
        equilibrium.
        """
        equation = self.equilibrium.bind(x)
        assert isinstance(equation, ChainEquation)
        *states, start = equation.blocks(equation.initial())
        # The first unit only forgets.
        return [*states[1:], equation(start)]

    def features(self, x: Tensor) -> Tensor:
        """The activations of the network's last layer.

        Raises:
            ShapeError: for inputs of another shape than the network was converted for.
        """
        if self.inputs not in (None, tuple(x.shape[1:])):
            raise ShapeError(
                f"This network was converted for inputs of shape {self.inputs}, got {tuple(x.shape[1:])};"
                " convert it with such an input, from_feedforward(network, x)."
            )
        return self.equilibrium(x)[:, self.slots[-1]].unflatten(1, self._shape)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the network; raises as `features` does."""
        return self.head(self.features(x))


def _unit(W: Slots, U: nn.Module, activation: Activation | str = "relu") -> OptEqUnit:
    unit = OptEqUnit(W, U, activation, bias=False, max_norm=None)
    unit.norm_checked = True  # the equilibrium exists whatever the norms
    return unit


def _without_bias(module: nn.Module) -> tuple[nn.Parameter | None, bool]:
    """The bias, taken out of a module, and whether it is along the last dimension."""
    bias = getattr(module, "bias", None)
    if bias is not None:
        module.register_parameter("bias", None)
    return bias, isinstance(module, nn.Linear)
