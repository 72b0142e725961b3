"""What a feed-forward network computes, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from opteq.activations import Activation, Identity, of_module
from opteq.errors import ConfigError, ShapeError

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# None of these has a negative entry but in its weights, which the norm bound of a converted layer relies on.
_IMAGE_MAPS = (
    nn.Conv2d,
    nn.ConvTranspose2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.CircularPad2d,
)
_MAXIMA = (nn.MaxPool2d, nn.AdaptiveMaxPool2d)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHODS = ("__call__", "__iter__", "forward")
_NEEDS_INPUT = (
    "without an input of known shape all layers have to be Linear, or all of them Conv2d that keep height and"
    " width; give one, from_feedforward(network, x)"
)

Shape = tuple[int | None, ...]
"""Of what a layer gives, without the batch; None for a side that is that of the input."""


class ChannelScale(nn.Module):
    """`h ↦ s h + b` channel by channel: a batch norm in eval mode.

    Args:
        norm: the batch norm.
    """

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        if norm.affine:
            scale = norm.weight.detach() * scale
        shift = -norm.running_mean * scale
        self.weight = nn.Parameter(scale)
        self.bias: nn.Parameter | None = nn.Parameter(shift + norm.bias.detach() if norm.affine else shift)
        self.images = isinstance(norm, nn.BatchNorm2d)

    def forward(self, h: Tensor) -> Tensor:
        place = (-1, *[1] * (h.dim() - 2))
        scaled = h * self.weight.view(place)
        return scaled if self.bias is None else scaled + self.bias.view(place)


_AFFINE = (nn.Linear, nn.Flatten, nn.Unflatten, ChannelScale, *_IMAGE_MAPS)


@dataclass(frozen=True)
class _Part:
    """A module of the network, or what has taken its place, and its name."""

    name: str
    module: nn.Module

    def refused(self, reason: str) -> ConfigError:
        # A module of several lines says less than its class.
        shown = type(self.module).__name__ if "\n" in repr(self.module) else repr(self.module)
        return ConfigError(
            f"Cannot convert {f'layer {self.name}' if self.name else 'the network'} ({shown}): {reason}."
        )


@dataclass(frozen=True)
class Layer:
    """`h ↦ σ(A h + b)`, where the parts give `A h + b` one after the other; the last alone has weights."""

    parts: list[_Part]
    activation: Activation

    @property
    def modules(self) -> list[nn.Module]:
        return [part.module for part in self.parts]


def read_layers(network: nn.Module) -> tuple[list[Layer], nn.Module]:
    """Layers and head of a network in eval mode, as copies.

    Raises:
        ConfigError: if a part is not known; the message names it.
    """
    if any(is_lazy(parameter) for parameter in network.parameters()):
        raise ConfigError("Expected a network that knows its shapes; run its lazy modules on an input first.")
    if not isinstance(network, nn.Sequential):
        raise ConfigError(
            f"Expected a torch.nn.Sequential of layers with activations, got a {type(network).__name__}."
        )
    parts = list(_parts(network))
    activations = [of_module(part.module) for part in parts]
    end = max((i for i, activation in enumerate(activations, start=1) if activation), default=len(parts))
    if not end:
        raise ConfigError("Expected a network with layers, got one without any.")
    head = parts[end:]
    for part in head:
        if not isinstance(part.module, (*_AFFINE, *_MAXIMA)):
            raise part.refused(
                "after the last activation there may be Linear, Conv2d, batch norm, padding, pooling, Flatten"
            )
    return _layers(parts[:end], activations), nn.Sequential(*(part.module for part in head))


def _layers(parts: list[_Part], activations: list[Activation | None]) -> list[Layer]:
    """Affine parts, each up to the first that has weights, with the activation that follows, if any."""
    layers: list[Layer] = []
    pending: list[_Part] = []
    for part, activation in zip(parts, activations, strict=False):
        if activation:
            layers.append(Layer(pending or [_Part(part.name, nn.Identity())], activation))
            pending = []
            continue
        if not isinstance(part.module, _AFFINE):
            raise part.refused(
                "up to the last activation there may be Linear, Conv2d, batch norm, padding, average pooling,"
                " Flatten, and monotone activations with slopes up to 1"
            )
        if pending and list(pending[-1].module.parameters()):
            layers.append(Layer(pending, Identity()))
            pending = []
        pending.append(part)
    return [*layers, Layer(pending, Identity())] if pending else layers


def _parts(module: nn.Module, name: str = "") -> Iterator[_Part]:
    """What a network in eval mode applies in turn, copied."""
    _expect_plain(_Part(name, module))
    if isinstance(module, nn.Sequential):
        # named_children() would leave out a module, such as an activation, that occurs once more.
        for key, child in zip(module._modules, module, strict=True):
            yield from _parts(child, f"{name}.{key}" if name else key)
    elif isinstance(module, (*_DROPOUTS, *_NORMS)):
        if module.training:
            raise _Part(name, module).refused("it is in training mode; call eval() on the network first")
        if isinstance(module, _NORMS):
            if module.running_var is None:
                raise _Part(name, module).refused(
                    "without running statistics it mixes the samples of a batch"
                )
            yield _Part(name, ChannelScale(module))
    elif not isinstance(module, nn.Identity):
        yield _Part(name, copy.deepcopy(module))


def _expect_plain(part: _Part) -> None:
    """Refuse a module that may compute something else than its class in `torch.nn` does."""
    module, kind = part.module, type(part.module)
    if is_parametrized(module):
        raise part.refused("it is parametrized; see torch.nn.utils.parametrize.remove_parametrizations")
    if any(vars(module)[hooks] for hooks in _HOOKS):
        raise part.refused(
            "it has hooks, which may change what it computes; remove them, as"
            " torch.nn.utils.remove_weight_norm does its own"
        )
    # A Sequential that somebody builds in a constructor of his own is still one.
    base = nn.Sequential if isinstance(module, nn.Sequential) else kind
    same = all(getattr(kind, name, None) is getattr(base, name, None) for name in _METHODS)
    if not same or "forward" in vars(module) or not base.__module__.startswith("torch.nn.modules."):
        raise part.refused(
            "what it computes is known to its own class alone; put modules of torch.nn into a"
            " torch.nn.Sequential"
        )


def kept_shapes(layers: list[Layer]) -> list[Shape]:
    """What layers give that keep the sides of the input, whatever these are.

    Raises:
        ConfigError: if one does not.
    """
    shapes: list[Shape] = []
    for layer in layers:
        # Before the first layer images may be flattened: what it reads is its own affair.
        flattens = not shapes and isinstance(layer.modules[0], nn.Flatten)
        match layer.modules[1:] if flattens else layer.modules:
            case [nn.Linear() as linear]:
                before, shape = linear.in_features, (linear.out_features,)
            case [nn.Conv2d() as conv] if _keeps_sides(conv):
                before, shape = conv.in_channels, (conv.out_channels, None, None)
            case [ChannelScale() as scale]:
                before = len(scale.weight)
                shape = (before, None, None) if scale.images else (before,)
            case [nn.Identity()] if shapes:
                before, shape = shapes[-1][0], shapes[-1]
            case _:
                raise layer.parts[-1].refused(_NEEDS_INPUT)
        if shapes and len(shape) != len(shapes[0]):
            raise layer.parts[-1].refused(_NEEDS_INPUT)
        if shapes and before != shapes[-1][0]:
            raise layer.parts[-1].refused(f"{shapes[-1][0]} channels come before it")
        shapes.append(shape)
    return shapes


def _keeps_sides(conv: nn.Conv2d) -> bool:
    if conv.padding == "same":
        return True
    padding = (0, 0) if isinstance(conv.padding, str) else conv.padding
    sizes = zip(padding, conv.dilation, conv.kernel_size, strict=True)
    return conv.stride == (1, 1) and all(2 * p == d * (k - 1) for p, d, k in sizes)


@torch.no_grad()
def shapes_for(layers: list[Layer], x: Tensor) -> list[Shape]:
    """What layers make of an input like `x`.

    Raises:
        ConfigError: if one does not fit.
        ShapeError: if `x` is no batch.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"Expected `x` to be a tensor of shape (batch, ...), got {got}.")
    weight = next((p for layer in layers for module in layer.modules for p in module.parameters()), x)
    h, shapes = weight.new_zeros(2, *x.shape[1:]), []
    for layer in layers:
        for part in layer.parts:
            before = h
            try:
                h = part.module(before)
                # Without a batch images have three dimensions.
                fits = len(h) == 2 and (before.dim() == 4 or not isinstance(part.module, _IMAGE_MAPS))
            except (RuntimeError, ValueError, IndexError):
                fits = False
            if not fits:
                shape = ", ".join(map(str, ("batch", *before.shape[1:])))
                raise part.refused(f"it cannot follow what has the shape ({shape})")
        shapes.append(tuple(h.shape[1:]))
    return shapes
