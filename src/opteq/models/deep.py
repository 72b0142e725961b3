"""Deep OptEq classifiers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.gradients.base import GradientMethod
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.regularised import Regularised
from opteq.models.classifier import ImageClassifier, equilibrium_layer
from opteq.models.extractors import EXTRACTORS, resnet_stages
from opteq.objectives.regularisers import Regulariser
from opteq.operators.base import LinearOperator
from opteq.operators.compose import Compose, DepthwiseSeparableConv2d
from opteq.operators.conv import Conv2d
from opteq.solvers.base import Solver

_EXTRACTED = 512
_WIDTHS = (1024, 2048)


class DeepOptEqClassifier(ImageClassifier):
    """One convolution, a deep OptEq of 3×3 convolutions, average pool, linear head (Xie et al. 2022, §7).

    Biases everywhere and no normalisation. With the published channels 16, 32, 64, 128, 128 on 30 state
    channels it has 200,238 parameters (the paper says 199k), with 16, 32, 64, 64, 128 it has 165,614 (162k).

    The training modes of Algorithm 1 are values of `gradient`: `Implicit()`, `Unrolled(20)`, and
    `Unrolled(20, select=SAM(...))`, which is R†; `regulariser` is R*.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the state.
        hidden: hidden channels of the units, first to last.
        alpha: `α` in (0, 1], for all units or one each.
        learn_alpha: learn one `α` per unit.
        activation: name of an activation in `opteq.activations`.
        max_norm: ceiling on the `‖W‖₂` of every unit, or None.
        regulariser: `R` in the hidden objective, or None.
        gamma: weight `γ` of the regulariser.
        form: `"gradient"` or `"prox"`, see `Regularised`.
        start: iterate from `"zero"` or from the `"input"`, the features.
        downsampling: factor by which average pooling shrinks the features before the equilibrium.
        solver: solver of the layer; None with a gradient that replaces the solve.
        gradient: gradient method of the layer.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 30,
        hidden: Sequence[int] = (16, 32, 64, 128, 128),
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        activation: str = "relu",
        max_norm: float | None = 0.97,
        regulariser: Regulariser | None = None,
        gamma: float = 0.1,
        form: str = "gradient",
        start: str = "zero",
        downsampling: int = 1,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        if min(in_channels, classes, channels, downsampling) < 1:
            raise ConfigError("Expected positive channels, classes and downsampling.")
        units = [
            OptEqUnit(Conv2d(channels, n), Conv2d(channels, n), activation, max_norm=max_norm) for n in hidden
        ]
        deep = DeepOptEq(units, alpha, learn_alpha, start)
        stem = nn.Sequential(nn.Conv2d(in_channels, channels, 3, padding=1), nn.AvgPool2d(downsampling))
        layer = equilibrium_layer(_regularised(deep, regulariser, gamma, form), solver, gradient)
        super().__init__(in_channels, classes, stem, layer)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits; raises as `features` does."""
        z = self.features(x)
        assert isinstance(z, Tensor)
        return self.head(z.mean((2, 3)))


class ResNetDeepOptEqClassifier(ImageClassifier):
    """Two ResNet stages, a deep OptEq of depthwise-separable units, and a convolutional head.

    The architectures of Xie et al. 2022, Table 6. `size="small"` has five units of a 3×3 depthwise and a 1×1
    convolution; `size="mid"` three units that stack a 5×5 depthwise convolution with two filters per
    channel, 1×1, 3×3 depthwise and 1×1. Both `W` and `U` are such operators. The state is that of the
    extractor, 512 channels at an eighth of the image size. With 1000 classes there are 8.79 M and
    13.7 M parameters; the paper prints 18 M and 40 M, which its own table does not add up to.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        extractor: `"resnet50"` or `"wide_resnet50"`, untrained.
        size: `"small"` or `"mid"`.
        alpha: `α` in (0, 1], for all units or one each.
        learn_alpha: learn one `α` per unit.
        max_norm: ceiling on the `‖W‖₂` of every unit, or None.
        regulariser: `R` in the hidden objective, or None.
        gamma: weight `γ` of the regulariser.
        form: `"gradient"` or `"prox"`, see `Regularised`.
        start: iterate from `"zero"` or from the `"input"`, the features.
        solver: solver of the layer; None with a gradient that replaces the solve.
        gradient: gradient method of the layer.

    Raises:
        ConfigError: for an unknown extractor or size, or numbers out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 1000,
        extractor: str = "resnet50",
        size: str = "small",
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        max_norm: float | None = 0.97,
        regulariser: Regulariser | None = None,
        gamma: float = 0.1,
        form: str = "gradient",
        start: str = "zero",
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        if min(in_channels, classes) < 1:
            raise ConfigError("Expected positive channels and classes.")
        if extractor not in EXTRACTORS:
            raise ConfigError(
                f"Expected `extractor` to be one of {', '.join(EXTRACTORS)}, got {extractor!r}."
            )
        if size not in _SIZES:
            raise ConfigError(f"Expected `size` to be one of {', '.join(_SIZES)}, got {size!r}.")
        operator, count = _SIZES[size]
        deep = DeepOptEq(
            [OptEqUnit(operator(), operator(), max_norm=max_norm) for _ in range(count)],
            alpha,
            learn_alpha,
            start,
        )
        layer = equilibrium_layer(_regularised(deep, regulariser, gamma, form), solver, gradient)
        super().__init__(in_channels, classes, resnet_stages(extractor, in_channels), layer)
        widths = (_EXTRACTED, *_WIDTHS)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))
            for a, b in zip(widths, _WIDTHS, strict=False)
        ]
        self.head = nn.Sequential(
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_WIDTHS[-1], classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits; raises as `features` does."""
        return self.head(self.features(x))


def _small() -> LinearOperator:
    return DepthwiseSeparableConv2d(_EXTRACTED, _EXTRACTED, 3)


def _mid() -> LinearOperator:
    wide = DepthwiseSeparableConv2d(_EXTRACTED, _EXTRACTED, 5, multiplier=2)
    return Compose(wide, DepthwiseSeparableConv2d(_EXTRACTED, _EXTRACTED, 3))


_SIZES = {"small": (_small, 5), "mid": (_mid, 3)}


def _regularised(deep: DeepOptEq, regulariser: Regulariser | None, gamma: float, form: str) -> EquilibriumMap:
    return deep if regulariser is None else Regularised(deep, regulariser, gamma, form)
