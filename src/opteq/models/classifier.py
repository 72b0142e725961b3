"""Image classifiers around equilibrium layers: stem, equilibrium, norm, pool, head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.gradients.base import DirectMethod, GradientMethod
from opteq.gradients.implicit import Implicit
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqUnit
from opteq.models.stem import doubling_stem
from opteq.objectives.patches import Patches
from opteq.operators.conv import Conv2d
from opteq.results import State
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Solver


class ImageClassifier(nn.Module):
    """`x ↦ stem ↦ equilibria`, to which the subclasses add the head and the logits.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        stem: extractor of the features `g(x)`.
        equilibria: what turns them into equilibria.
    """

    def __init__(self, in_channels: int, classes: int, stem: nn.Module, equilibria: nn.Module) -> None:
        super().__init__()
        self.in_channels, self.classes = in_channels, classes
        self.stem, self.equilibria = stem, equilibria

    @property
    def equilibrium_layers(self) -> list[EquilibriumLayer]:
        """The equilibrium layers, first to last."""
        return [m for m in self.modules() if isinstance(m, EquilibriumLayer)]

    def features(self, x: Tensor) -> State:
        """`(batch, channels, h, w)` equilibrium of the last layer; one such tensor per branch.

        Raises:
            ShapeError: if `x` is no batch of images with `in_channels` channels.
            NonFiniteError: if `x` has NaN or infinite values.
        """
        check_images(x, self)
        return self.equilibria(self.stem(x))


def check_images(x: Tensor, network: nn.Module) -> None:
    """Raise a `ShapeError` unless `x` is a batch of images for a network with these `in_channels`."""
    if x.dim() != 4 or x.shape[1] != network.in_channels:
        raise ShapeError(
            f"Expected images of shape (batch, {network.in_channels}, height, width), got {tuple(x.shape)}."
        )
    dtype = next(network.parameters()).dtype
    autocast = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    if x.dtype != dtype and not autocast:
        raise ShapeError(f"Expected images of {dtype}, got {x.dtype}; convert them with images.to({dtype}).")


def linear_head(features: int, classes: int, dropout: float) -> nn.Sequential:
    """A linear head that drops features in training.

    Raises:
        ConfigError: if `dropout` is no probability.
    """
    if not 0 <= dropout <= 1:
        raise ConfigError(f"Expected `dropout` to be a probability from 0 to 1, got {dropout}.")
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(features, classes))


def equilibrium_layer(
    equilibrium_map: EquilibriumMap, solver: Solver | None, gradient: GradientMethod | None
) -> EquilibriumLayer:
    """A layer of a model, with `Implicit(tol=1e-3)` and `Anderson(tol=1e-3)` for want of others.

    A gradient that replaces the solve needs no solver. Samples that do not converge are counted, because the
    training loop logs them.
    """
    gradient = Implicit(tol=1e-3) if gradient is None else gradient
    if solver is None and not isinstance(gradient, DirectMethod):
        solver = Anderson(tol=1e-3)
    return EquilibriumLayer(equilibrium_map, solver, gradient, on_unconverged="count")


class EquilibriumClassifier(ImageClassifier):
    """`x ↦ stem ↦ z* of each equilibrium layer in turn ↦ batch norm, average pool ↦ linear head`.

    The subclasses choose the map. Images `(batch, in_channels, H, W)`, logits `(batch, classes)`.

    Args:
        maps: one equilibrium map per layer, all from and to `channels` channels.
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the equilibria.
        padding: zeros added on every side of the image, so that its size divides as the stem needs.
        downsamplings: number of stem convolutions of stride 2; each halves height and width.
        pool: height and width that the equilibrium is averaged to before the head.
        dropout: probability of dropping a feature before the head.
        solver: solver of the layers; None with a gradient that replaces the solve.
        gradient: gradient method of the layers.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(
        self,
        maps: list[EquilibriumMap],
        in_channels: int,
        classes: int,
        channels: int,
        padding: int = 0,
        downsamplings: int = 0,
        pool: int = 1,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        if not maps:
            raise ConfigError("Expected `depth` to be at least 1.")
        if min(in_channels, classes, channels, pool) < 1 or min(padding, downsamplings) < 0:
            raise ConfigError(
                "Expected positive channels, classes and pool, and no negative padding or downsamplings."
            )
        equilibria = nn.Sequential(*(equilibrium_layer(m, solver, gradient) for m in maps))
        super().__init__(
            in_channels, classes, doubling_stem(in_channels, channels, downsamplings, padding), equilibria
        )
        self.norm = nn.BatchNorm2d(channels)
        self.pool = pool
        self.head = linear_head(channels * pool**2, classes, dropout)

    @property
    def stages(self) -> list[nn.Module]:
        """What `forward` applies in turn, for certificates."""
        return [
            self.stem,
            self.equilibria,
            self.norm,
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(self.pool),
            nn.Flatten(),
            self.head,
        ]

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits; raises as `features` does."""
        z = self.features(x)
        assert isinstance(z, Tensor)
        pooled = F.adaptive_avg_pool2d(F.relu(self.norm(z)), self.pool)
        return self.head(pooled.flatten(1))


class OptEqClassifier(EquilibriumClassifier):
    """A classifier of OptEq units `z = Wᵀσ(W z + U x + b)` with 3×3 convolutions `W` and `U`.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the state `z`.
        hidden: channels of `W z`.
        depth: number of equilibrium layers.
        activation: name of an activation in `opteq.activations`.
        max_norm: ceiling on `‖W‖₂`, or None.
        padding, downsamplings, pool, dropout, solver, gradient: see `EquilibriumClassifier`.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 32,
        hidden: int = 64,
        depth: int = 1,
        activation: str = "relu",
        max_norm: float | None = 0.97,
        padding: int = 0,
        downsamplings: int = 0,
        pool: int = 1,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        maps: list[EquilibriumMap] = [
            OptEqUnit(Conv2d(channels, hidden, 3), Conv2d(channels, hidden, 3), activation, max_norm=max_norm)
            for _ in range(depth)
        ]
        super().__init__(
            maps, in_channels, classes, channels, padding, downsamplings, pool, dropout, solver, gradient
        )


class GEQClassifier(EquilibriumClassifier):
    """A classifier of Gaussian kernel maps with patches (GEQ, Li et al. 2023), 3×3 convolutions `W` and `U`.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the state `y`.
        hidden: channels of `W y`, split into patches.
        depth: number of equilibrium layers.
        patch_channels: channels in a patch.
        patch_size: height and width of a patch; must divide the state's.
        patch_hidden: columns of the patch projection `W_h`.
        gamma: a positive number or `"adaptive"`.
        activation: name of an activation in `opteq.activations`.
        max_norm: ceiling on `‖W‖₂`, or None.
        padding, downsamplings, pool, dropout, solver, gradient: see `EquilibriumClassifier`.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 32,
        hidden: int = 64,
        depth: int = 1,
        patch_channels: int = 8,
        patch_size: int = 2,
        patch_hidden: int = 64,
        gamma: float | str = "adaptive",
        activation: str = "relu",
        max_norm: float | None = 0.97,
        padding: int = 0,
        downsamplings: int = 0,
        pool: int = 1,
        dropout: float = 0.0,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        maps: list[EquilibriumMap] = [
            GaussianMap(
                Conv2d(channels, hidden, 3),
                Conv2d(channels, hidden, 3),
                Patches(patch_channels, patch_size),
                patch_hidden,
                gamma,
                activation=activation,
                max_norm=max_norm,
            )
            for _ in range(depth)
        ]
        super().__init__(
            maps, in_channels, classes, channels, padding, downsamplings, pool, dropout, solver, gradient
        )
