"""What an equilibrium is worth: the scores without it, and what the weights behind it do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.activations import Activation
from opteq.errors import ConfigError
from opteq.evaluation.inside import parts, passage
from opteq.evaluation.paired import Difference, paired
from opteq.evaluation.passes import Spread, evaluating
from opteq.evaluation.trace import noting, read_as
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer
from opteq.maps.gaussian import GaussianMap
from opteq.maps.skip import SkipWeight
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.results import State, map_state, norm, tensors_of
from opteq.theory.bounds import published_lipschitz_geq, published_lipschitz_optequnit
from opteq.theory.spectrum import Spectrum, singular_values

STEPS = (1, 2, 3, 5, 10, 20)
STUDIED_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """The quantities of Remarks 1 and 2 of Li et al. 2023, for one Gaussian kernel map and as measured.

    The papers have no patches. With patches `W_hᵀ` stands in front of `W`, `U` and `b`: their norms here are
    `‖W_h‖` times their own, and a weight is that of one patch.

    Attributes:
        largest_weight: `β_max`, the largest `e^{-γ‖U x + b - W y*‖²}`.
        gamma: the largest `γ`.
        W_norm: `‖W‖₂`, so that `m = ‖WᵀW‖₂` is its square.
        U_norm: `‖U‖₂`; NaN for a `U` that is no opteq operator.
        bias_norm: `‖b‖₂`, over all pixels; 0 without a bias.
        classifier_norm: `‖W_c‖₂` of the last linear layer of the network; NaN for a network that has none.
        size: `B`, the largest `‖x‖` or `‖y*‖`.
    """

    largest_weight: float
    gamma: float
    W_norm: float
    U_norm: float
    bias_norm: float
    classifier_norm: float
    size: float

    @property
    def norm(self) -> float:
        """`μ = max{‖U‖, ‖W‖, ‖W_c‖, ‖b‖}`."""
        # Unlike Python's, the maximum of NaN is NaN.
        return float(np.max([self.U_norm, self.W_norm, self.classifier_norm, self.bias_norm]))

    @property
    def remark1(self) -> bool:
        """Whether what Remark 1 asks for holds: `β_max < 0.8`, and `μ` and `m` in (0.9, 1)."""
        return self.largest_weight < 0.8 and 0.9 < self.norm < 1 and 0.9 < self.W_norm**2 < 1

    @property
    def remark2(self) -> bool:
        """Whether what Remark 2 asks for holds: `β_max < 0.8`, `B < 1` and `√γ < 0.2`."""
        return self.largest_weight < 0.8 and self.size < 1 and math.sqrt(self.gamma) < 0.2

    @property
    def generalization(self) -> tuple[float, float, float]:
        """`β_max μ/(1 - β_max m)`, `(2μβ_max + 1)/(1 - β_max m)` and `1/(1 - m)`.

        By Remark 1 the bound on the generalization error is below that of OptEq where the last of them is the
        largest. NaN where `m` is not below 1, or `μ` is not known.
        """
        beta, mu, m = self.largest_weight, self.norm, self.W_norm**2
        if not m < 1:
            return math.nan, math.nan, math.nan
        return beta * mu / (1 - beta * m), (2 * mu * beta + 1) / (1 - beta * m), 1 / (1 - m)

    @property
    def lipschitz(self) -> tuple[float, float]:
        """`L_geq` and `L_opteq` of Proposition 3, with `μ = max{‖U‖, ‖W‖}`; NaN where it does not apply."""
        mu = float(np.max([self.U_norm, self.W_norm]))
        try:
            opteq = published_lipschitz_optequnit(mu).value.item()
        except ConfigError:
            return math.nan, math.nan
        try:
            geq = published_lipschitz_geq(self.largest_weight, mu, self.gamma, self.size).value.item()
        except ConfigError:
            geq = math.nan
        return geq, opteq


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What was seen in one equilibrium layer.

    Attributes:
        name: of the layer in the network.
        map: class of its map.
        symbol: of what is read out of a state: `z`, the state itself, or `y`, its hidden variable.
        residual: `(3, 21)` relative residual `‖T(z) - z‖ / ‖T(z)‖` at `z⁰, …, z²⁰` of the plain iteration:
            the 10th, 50th and 90th percentile over the samples.
        operators: names of the operators in its equation, in the order of units or branches: `W`; then
            the projections of patches, `W_h`.
        spectra: their singular values.
        active: for each activation the share of its units with `σ'(a) ≠ 0` at the equilibrium.
        alpha: the `α` of its skip connections.
        input_norm: median and largest `‖x‖` over the samples, of what enters the layer.
        output_norm: the same of what is read out of `z*`.
        scale: root mean square of that, for each branch.
        channels: for each branch the number of its channels, and the effective one: `(Σλ)² / Σλ²` with the
            eigenvalues `λ` of the correlations of the channels over samples and pixels. It is 1 where all of
            them tell the same, and their number where none is correlated with another; NaN where none varies.
        kernels: for each Gaussian kernel the quantities of the remarks about it.
    """

    name: str
    map: str
    symbol: str
    residual: NDArray[np.float64]
    operators: tuple[str, ...]
    spectra: tuple[Spectrum, ...]
    active: tuple[float, ...]
    alpha: tuple[float, ...]
    input_norm: tuple[float, float]
    output_norm: tuple[float, float]
    scale: tuple[float, ...]
    channels: tuple[tuple[int, float], ...]
    kernels: tuple[KernelRecord, ...]


@dataclass(frozen=True, slots=True)
class EquilibriumRecord:
    """What the equilibria of a network are worth on a test set.

    Attributes:
        samples: number of images.
        steps: numbers `K` of iterations.
        accuracy: the accuracy with `K` iterations in place of every equilibrium; of pixels for scenes.
        full_accuracy: the accuracy of the network as it is.
        gains: what it is above the accuracy with `K` iterations, image by image.
        layers: the equilibrium layers, in the order of their calls, on the first 256 images.
        head_scale: root mean square of what the last linear layer reads; NaN for a network without one.
    """

    samples: int
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    full_accuracy: float
    gains: tuple[Difference, ...]
    layers: tuple[LayerRecord, ...]
    head_scale: float


def study_equilibrium(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    device: torch.device | str | None = None,
    share: float = 1.0,
) -> EquilibriumRecord:
    """Measure what the equilibria of a network are worth, in eval mode.

    `K` iterations are `K` plain evaluations `z ← T(z)` from the start `z⁰` of a layer, in all layers of the
    network at once, followed by readout and head. Nothing of the network is changed but its device.

    Args:
        network: maps images to logits, `(batch, classes)`, or `(batch, classes, height, width)` for scenes.
        loader: batches `(images, labels)`; labels that are negative do not count.
        device: where to run; where the network is unless given.
        share: of the images that are studied, evenly spread: test sets are often in the order of classes.

    Raises:
        ConfigError: if the network calls no equilibrium layer, or no label counts.
    """
    if device is None:
        device = next((p.device for p in network.parameters()), torch.device("cpu"))
    names = {m: name for name, m in network.named_modules() if isinstance(m, EquilibriumLayer)}
    linears = [m for m in network.modules() if isinstance(m, nn.Linear)][-1:]
    studies: dict[EquilibriumLayer, _Study] = {}
    rows: list[Tensor] = []
    known, read = 0, _Squares()
    with evaluating(network, device) as dtype, _own_randomness(device):
        for images, labels in Spread(loader, share):
            images, labels = images.to(device, dtype), labels.to(device)
            with noting([*names, *linears]) as calls:
                full = _hits(network(images), labels)
            columns = []
            for steps in STEPS:
                with _iterating(names, steps):
                    columns.append(_hits(network(images), labels))
            rows.append(torch.stack([*columns, full], 1).cpu())
            for module, x in calls:
                if isinstance(module, EquilibriumLayer):
                    studies.setdefault(module, _Study(module)).add(x)
                else:
                    read.add(x)
            known += int((labels >= 0).sum())
        if rows and not studies:
            raise ConfigError("This network has no equilibrium layer: there is no equilibrium to study.")
        if not known:
            raise ConfigError("The test set is empty: give at least one image with a label.")
        classifier_norm = max((_norm(linear.weight) for linear in linears), default=math.nan)
        hits = torch.cat(rows).double()
        *accuracy, full_accuracy = (hits.sum(0) / known).tolist()
        # An image of a scene counts by its pixels, so that the mean over images is that of the accuracy.
        gains = (hits[:, -1:] - hits[:, :-1]) * (len(hits) / known)
        return EquilibriumRecord(
            len(hits),
            STEPS,
            tuple(accuracy),
            full_accuracy,
            tuple(paired(column) for column in gains.T.tolist()),
            tuple(study.record(names[layer], classifier_norm) for layer, study in studies.items()),
            read.root_mean,
        )


class _Study:
    """What is seen of one layer, call by call, until there are enough samples."""

    def __init__(self, layer: EquilibriumLayer) -> None:
        self.layer = layer
        self.residuals: list[Tensor] = []
        self.input_norms: list[Tensor] = []
        self.output_norms: list[Tensor] = []
        self.moments: list[_Moments] = []
        # For each activation the shares of every sample; for each kernel the largest weights and γ.
        self.active: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []
        self.gammas: list[list[Tensor]] = []

    def add(self, x: State) -> None:
        left = STUDIED_SAMPLES - sum(map(len, self.input_norms))
        if left <= 0:
            return
        x = map_state(lambda t: t[:left], x)
        equation, solution = self.layer.bind(x), self.layer.solve(x)
        if not self.input_norms:
            # All samples share the weights.
            self.x, self.equation = map_state(lambda t: t[:1], x), equation
            self.moments = [_Moments() for _ in tensors_of(solution.value)]
            self.active = [[] for _ in parts(equation, Activation)]
            self.weights = [[] for _ in parts(equation, GaussianSimilarity)]
            self.gammas = [[] for _ in self.weights]
        self.input_norms.append(norm(x))
        self.output_norms.append(norm(solution.value))
        for moments, z in zip(self.moments, tensors_of(solution.value), strict=True):
            moments.add(z)
        # One more, since the residual of an iterate shows in the next.
        self.residuals.append(Unrolled(STEPS[-1] + 1).run(equation)[1].residuals)
        seen = passage(equation, solution.state)
        for rows, calls in zip(self.active, seen.active, strict=True):
            rows += calls
        similarities = parts(equation, GaussianSimilarity)
        for weights, gammas, calls, similarity in zip(
            self.weights, self.gammas, seen.weights, similarities, strict=True
        ):
            weights += [w.amax(1) for w in calls]
            gammas.append(similarity.gamma)

    def record(self, name: str, classifier_norm: float) -> LayerRecord:
        equation, map = self.equation, self.layer.map
        similarities = list(parts(equation, GaussianSimilarity))
        # What has no weights resamples for a coupling, unless it is the operator of a kernel.
        of_kernels = [id(similarity.W) for similarity in similarities]
        operators = [W for W in parts(equation, BoundOperator) if W.tensors or id(W) in of_kernels]
        spectra = {id(W): singular_values(W) for W in operators}
        projections = [_projection(s.gram) for s in similarities if s.gram is not None]
        size = max(float(torch.cat(norms).max()) for norms in (self.input_norms, self.output_norms))
        maps: list[GaussianMap | None] = [m for m in map.modules() if isinstance(m, GaussianMap)]
        if len(maps) != len(similarities):
            maps = [None] * len(similarities)
        kernels = []
        seen = zip(maps, similarities, self.weights, self.gammas, strict=True)
        for own, similarity, weights, gammas in seen:
            factor = 1.0 if similarity.gram is None else math.sqrt(_norm(similarity.gram))
            W, U, b = spectra[id(similarity.W)].largest, *self._injection(own, similarity)
            weight, gamma = float(torch.cat(weights).max()), float(torch.cat(gammas).max())
            norms = factor * W, factor * U, factor * b, classifier_norm
            kernels.append(KernelRecord(weight, gamma, *norms, size))
        residual = torch.cat(self.residuals).double().cpu().numpy()
        return LayerRecord(
            name,
            map.title,
            read_as(self.layer),
            np.quantile(residual, [0.1, 0.5, 0.9], axis=0),
            (*_numbered("W", len(spectra)), *_numbered("W_h", len(projections))),
            (*spectra.values(), *projections),
            tuple(float(torch.cat(rows).mean()) for rows in self.active if rows),
            tuple(float(m.value) for m in map.modules() if isinstance(m, SkipWeight)),
            _median_and_largest(self.input_norms),
            _median_and_largest(self.output_norms),
            tuple(moments.root_mean for moments in self.moments),
            tuple((len(moments.total), moments.effective) for moments in self.moments),
            tuple(kernels),
        )

    def _injection(self, map: GaussianMap | None, similarity: GaussianSimilarity) -> tuple[float, float]:
        """`‖U‖` and `‖b‖` of a Gaussian map; NaN where it does not say."""
        if map is None or not isinstance(self.x, Tensor):
            return math.nan, math.nan
        U, bias = map.injection.operator, map.injection.bias
        known = isinstance(U, LinearOperator)
        U_norm = singular_values(U.bind(tuple(self.x.shape[1:]))).largest if known else math.nan
        pixels = math.prod(similarity.injection.shape[2:])
        return U_norm, 0.0 if bias is None else math.sqrt(pixels) * float(bias.norm())


class _Squares:
    """The root mean square of all numbers in tensors that are seen one by one."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, t: Tensor) -> None:
        self.total += float(t.double().square().sum())
        self.count += t.numel()

    @property
    def root_mean(self) -> float:
        return math.sqrt(self.total / self.count) if self.count else math.nan


class _Moments:
    """Moments of the channels of tensors `(batch, channels, ...)` that are seen one by one."""

    def __init__(self) -> None:
        self.count, self.total, self.products = 0, torch.zeros(()), torch.zeros(())

    def add(self, t: Tensor) -> None:
        rows = t.double().movedim(1, -1).flatten(0, -2).cpu()
        self.count += len(rows)
        self.total = self.total + rows.sum(0)
        self.products = self.products + rows.mT @ rows

    @property
    def root_mean(self) -> float:
        return math.sqrt(float(self.products.trace()) / (self.count * len(self.total)))

    @property
    def effective(self) -> float:
        """`(Σλ)² / Σλ²` of the correlations; of those channels that vary beyond rounding."""
        mean = self.total / self.count
        covariance = self.products / self.count - torch.outer(mean, mean)
        variance = covariance.diag()
        varies = variance > 1e-12 * self.products.diag() / self.count
        if not varies.any():
            return math.nan
        scale = variance[varies].rsqrt()
        correlation = scale[:, None] * covariance[varies][:, varies] * scale
        return float(varies.sum() ** 2 / correlation.square().sum())


@contextmanager
def _iterating(layers: Iterable[EquilibriumLayer], steps: int) -> Iterator[None]:
    """With so many plain iterations in place of every equilibrium."""
    before = [(layer, layer.gradient, layer.on_unconverged) for layer in layers]
    for layer, *_ in before:
        # What has not converged is no news here.
        layer.gradient, layer.on_unconverged = Unrolled(steps), "count"
    try:
        yield
    finally:
        for layer, gradient, on_unconverged in before:
            layer.gradient, layer.on_unconverged = gradient, on_unconverged


def _own_randomness(device: torch.device | str) -> AbstractContextManager[None]:
    """Leave the global generators as they are: loaders draw from them."""
    device = torch.device(device)
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """`(batch,)` how many labels of each image the logits name; those that are not finite name none."""
    right = (logits.argmax(1) == labels) & logits.isfinite().all(1) & (labels >= 0)
    return right.reshape(len(right), -1).sum(1)


def _projection(gram: Tensor) -> Spectrum:
    """The singular values of a `W_h`, from its Gram matrix."""
    values = torch.linalg.eigvalsh(gram.double()).flip(0).clamp(min=0).sqrt()
    shape = (len(values),)
    return Spectrum(values, torch.full_like(values, 1 / len(values)), "exact", shape, shape)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}{i}" for i in range(1, count + 1))


def _median_and_largest(rows: list[Tensor]) -> tuple[float, float]:
    values = torch.cat(rows)
    return float(values.median()), float(values.max())
