"""What the branches of a multi-branch network have to do with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.layer import EquilibriumLayer
from opteq.models.classifier import ImageClassifier
from opteq.objectives.coupling import HeritageDiversity
from opteq.results import tensors_of
from opteq.theory.perturbations import binomial, reconstructed, uniform

STUDIED_SAMPLES = 256
RELATED_SAMPLES = 100
DIRECTIONS = ("reconstructed", "uniform", "binomial")
SIZES = (0.0, 0.05, 0.1, 0.2, 0.3)
TRIALS = 5
# Enough for an efficient solve, few enough for large images.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """How the branches of a network relate on test images, and how they bear perturbed features.

    With `N = vec⁻¹(z_i)ᵀ vec⁻¹(P z_{i+1})`, the inner products between channels of neighbouring branches,
    for `L` branches of `C` channels on a ring (Li et al. 2022, Figures 2 and 3a). A network of one branch
    has `n = C = 0`; one without branches also has no sizes.

    Attributes:
        heritage: `(n,)` average `H`, the sum of the diagonals of `N` over `L·C`.
        diversity: `(n,)` average `D`, the sum of the magnitudes beside them over `L(C² - C)`.
        diagonal_share: `(n,)` share of the diagonal in `Σ|N|` of the first two branches; `1/C` by chance.
        correlation: `(C, C)` the `|Nᵀ|` of the first two branches for the first sample.
        sizes: `(s,)` sizes `ε` of the perturbations of the features `g(x)`.
        accuracy: `(3, trials, s)` accuracy under them, for each of `DIRECTIONS`.
    """

    heritage: NDArray[np.float64]
    diversity: NDArray[np.float64]
    diagonal_share: NDArray[np.float64]
    correlation: NDArray[np.float64]
    sizes: NDArray[np.float64]
    accuracy: NDArray[np.float64]

    @classmethod
    def nothing(cls) -> Self:
        """The record of a network without branches."""
        none = np.zeros(0)
        return cls(none, none, none, np.zeros((0, 0)), none, np.zeros((len(DIRECTIONS), 0, 0)))


def study_branches(network: nn.Module, images: Tensor, labels: Tensor) -> BranchRecord:
    """Record how the branches of `network`, in eval mode, relate and bear perturbed features.

    Args:
        network: any network; one without branches has an empty record.
        images: `(n, channels, height, width)`, normalised, on the network's device.
        labels: `(n,)` their true classes.
    """
    if not has_branches(network, images):
        return BranchRecord.nothing()
    heritage, diversity, share, correlation = relations(network, images[:RELATED_SAMPLES])
    return BranchRecord(
        heritage, diversity, share, correlation, np.array(SIZES), _accuracies(network, images, labels)
    )


@torch.no_grad()
def has_branches(network: nn.Module, images: Tensor) -> TypeGuard[ImageClassifier]:
    """Whether `network` is a classifier whose body is an equilibrium of branches, with a hidden objective."""
    if not isinstance(network, ImageClassifier) or not isinstance(network.body, EquilibriumLayer):
        return False
    equation = network.body.bind(network.stem(images[:1]))
    return equation.objective is not None and isinstance(equation.initial(), tuple)


@torch.no_grad()
def relations(network: ImageClassifier, images: Tensor) -> tuple[NDArray[np.float64], ...]:
    """Average `H` and `D` and the diagonal shares, each `(n,)`, and the correlations of the first image.

    They are those of the states `z_i`, which the coupling is about, also where hidden variables are read.
    All are empty for a network of one branch; see `BranchRecord`.
    """
    layer = network.body
    assert isinstance(layer, EquilibriumLayer)
    rows: list[Tensor] = []
    for part in images.split(_BATCH):
        z = tensors_of(layer.solve(network.stem(part)).state)
        if len(z) == 1:
            nothing = BranchRecord.nothing()
            return nothing.heritage, nothing.diversity, nothing.diagonal_share, nothing.correlation
        rows.append(torch.stack(HeritageDiversity().at(z).correlations(z), 1))
    n = torch.cat(rows).double().cpu()  # (samples, L, C, C)
    diagonal = n.diagonal(dim1=2, dim2=3)
    # Of a single channel there are no others.
    others = max(n.shape[1] * n.shape[2] * (n.shape[2] - 1), 1)
    first = n[:, 0].abs()
    return (
        diagonal.mean((1, 2)).numpy(),
        ((n.abs().sum((1, 2, 3)) - diagonal.abs().sum((1, 2))) / others).numpy(),
        (diagonal[:, 0].abs().sum(1) / first.sum((1, 2)).clamp(min=1e-300)).numpy(),
        first[0].mT.numpy(),
    )


@torch.no_grad()
def _accuracies(network: ImageClassifier, images: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """`(3, trials, s)` accuracy for features moved by `-ε` times a direction of `l∞` norm at most 1."""
    layer = network.body
    assert isinstance(layer, EquilibriumLayer)
    generator = torch.Generator(images.device).manual_seed(0)
    hits = np.zeros((len(DIRECTIONS), TRIALS, len(SIZES)))
    for part, truth in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
        features = network.stem(part)
        hits[0] += _hits(network, features, reconstructed(layer, features, 1.0), truth)
        for trial in range(TRIALS):
            hits[1, trial] += _hits(network, features, uniform(features, 1.0, generator), truth)
            hits[2, trial] += _hits(network, features, binomial(features, 1.0, generator), truth)
    return hits / len(images)


def _hits(network: ImageClassifier, features: Tensor, direction: Tensor, labels: Tensor) -> list[int]:
    """For each size how many samples are still classified rightly."""
    answers = (network.head(network.body(features - size * direction)) for size in SIZES)
    return [int((logits.argmax(1) == labels).sum()) for logits in answers]
