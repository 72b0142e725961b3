"""Regularisers that compare features across the samples of a batch."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.objectives.regularisers import Regulariser
from opteq.options import check, check_counts, check_positive, is_whole


class BatchRegulariser(nn.Module, Regulariser):
    """A regulariser of the batch of features as a whole, with a running form for inference.

    In training mode the samples of the batch are compared with each other, and the batch is kept as the
    reference. In eval mode each sample is compared with the reference, the last training batch, as
    if it were one of it; predictions then do not depend on which images share a batch, and single
    images will do. The reference is saved with the model; before the first training batch there is
    nothing to compare with, and the gradient is zero.
    """

    batch_coupled = True
    reference: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reference", None)

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """`R(Z)`, a scalar."""

    @abstractmethod
    def gradient_against(self, z: Tensor, reference: Tensor) -> Tensor:
        """What samples `z` would contribute to `∇R` as members of the batch `reference`.

        `gradient_against(z, z)` is `∇R(z)`.
        """

    def gradient(self, z: Tensor) -> Tensor:
        """`∇R(z)` in training mode; against the reference in eval mode.

        Raises:
            ConfigError: for a single sample in training mode, or features that are not of the shape of
                the reference in eval mode.
        """
        name = type(self).__name__
        if self.training:
            if len(z) < 2:
                raise ConfigError(
                    f"{name} compares the samples of a batch, and this one has one; train with more."
                )
            # A buffer that can be saved whatever the layout of the state.
            self.reference = z.detach().contiguous()
            return self.gradient_against(z, z)
        if self.reference is None:
            return torch.zeros_like(z)
        if self.reference.shape[1:] != z.shape[1:]:
            raise ConfigError(
                f"{name} was trained on features of shape {tuple(self.reference.shape[1:])}"
                f" and cannot be compared with {tuple(z.shape[1:])}; use images of the training size."
            )
        # Certificates look at a layer in float64.
        return self.gradient_against(z, self.reference.to(z.dtype))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # The reference has the shape of the last training batch, which a new module cannot know.
        saved = state_dict.get(prefix + "reference")
        if saved is not None:
            self.reference = torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Decorrelation(BatchRegulariser):
    """`R(Z) = ½‖D Z Zᵀ D - I‖_F²`, `D = diag(1/‖z_i‖)` (Xie et al. 2022, Eq. 13).

    The features `z_i` are the rows of `Z ∈ R^{m×B}`: every entry of the state is one, and its values
    over the batch are compared. With the normalised rows `Ẑ = DZ` this is `½(‖ẐᵀẐ‖_F² - m)`, at a cost
    of `m B²`, and row `i` of the gradient is `2/‖z_i‖ (I - Proj_i) Σ_{j≠i} Proj_j ẑ_i`, `Proj_j = ẑ_jẑ_jᵀ`
    (misprinted in Table 2). A row that is zero, as behind a ReLU, counts as uncorrelated with all others
    and gets no gradient.

    Unbounded where rows approach zero: no Lipschitz constant. In a small batch some row nearly always does,
    and solves with it fail however small `γ` is; use batches of dozens of samples. Steps `γ∇R` stay short
    while `2γ λ_max(ẐẐᵀ)` is below the least `‖z_i‖²`: features of half the size need a quarter of `γ`.
    """

    def value(self, z: Tensor) -> Tensor:
        rows = z.flatten(1)  # (B, m), the transpose of Z
        scale = _inverse_norms(rows)
        gram = (rows * scale) @ (rows * scale).mT
        return 0.5 * (gram.square().sum() - (scale > 0).sum())

    def gradient_against(self, z: Tensor, reference: Tensor) -> Tensor:
        rows, others = z.flatten(1), reference.flatten(1)
        scale = _inverse_norms(others)
        unit, units = rows * scale, others * scale
        # Columns of ẐẐᵀẐ for z, and (ẐẐᵀẐ)_i · ẑ_i = Σ_b ẑ_ib (Ẑ Ẑᵀẑ_b)_i, a sum over the reference.
        pull = (unit @ units.mT) @ units
        along = (units * ((units @ units.mT) @ units)).sum(0)
        return (2 * scale * (pull - along * unit)).view_as(z)


class HSIC(BatchRegulariser):
    """`R(Z) = Σ_{i<j} (B-1)⁻² tr(K_i H K_j H)`, the Hilbert-Schmidt independence criterion of all pairs.

    Features are the channels of the state: numbers for `(batch, m)`, maps of `n = H·W` pixels for images.
    `K_i` is the `B×B` matrix of `exp(-‖a-b‖²/(2 s² n))` over the batch and `H` the centering matrix. All
    pairs at once cost `m B² (n + 1)`, since with centred `K̃_i` and `S = Σ K̃_i`

        R = ½ (B-1)⁻² (‖S‖_F² - Σ ‖K̃_i‖_F²)

    (Xie et al. 2022, §7.2.1.) Not convex.

    Args:
        bandwidth: `s`, in units of a root-mean-square difference between two pixels.
    """

    def __init__(self, bandwidth: float = 1.0) -> None:
        super().__init__()
        check_positive("bandwidth", bandwidth)
        self.bandwidth = float(bandwidth)

    def value(self, z: Tensor) -> Tensor:
        features = _channels(z)
        kernel = self._kernel(features, features)
        centred = _centred(kernel, kernel)
        pairs = centred.sum(0).square().sum() - centred.square().sum()
        return 0.5 * pairs / (len(z) - 1) ** 2

    def gradient_against(self, z: Tensor, reference: Tensor) -> Tensor:
        features, others = _channels(z), _channels(reference)
        kernel = self._kernel(features, others)
        inner = kernel if z is reference else self._kernel(others, others)
        centred = _centred(kernel, inner)
        # dR/dK_i = (B-1)⁻² (S - K̃_i), since H is a projection; K_i changes along both of its indices.
        weight = (centred.sum(0) - centred) * kernel / (len(reference) - 1) ** 2
        drift = weight.sum(2, keepdim=True) * features - weight @ others
        scale = -2 / (self.bandwidth**2 * features.shape[2])
        return _uncharted(scale * drift, z)

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        """`(m, A, B)` kernel values."""
        squares = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None] - 2 * a @ b.mT
        return torch.exp(squares.clamp(min=0) * (-0.5 / (self.bandwidth**2 * a.shape[2])))

    def extra_repr(self) -> str:
        return f"bandwidth={self.bandwidth}"


class RandomFeatureHSIC(BatchRegulariser):
    """`HSIC` with each kernel replaced by random Fourier features (Rahimi and Recht 2007).

    `K_i ≈ F_iF_iᵀ` with `F_i = √(2/D) cos(z_i Ω/(s√n) + φ)`, `Ω` Gaussian and `φ` uniform, fixed by `seed`
    and shared by the channels. With `F̃ = HF` over all channels

        R ≈ ½ (B-1)⁻² (‖F̃F̃ᵀ‖_F² - Σ ‖F̃_iF̃_iᵀ‖_F²)

    at a cost of `m B D (n + min(B, m D))`, less than the exact one for batches larger than `m D`.

    Args:
        features: `D`, number of random features per channel; the error falls as `1/√D`.
        bandwidth: `s`, as for `HSIC`.
        seed: of the random features.
    """

    def __init__(self, features: int = 16, bandwidth: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        check_counts(features=features)
        check_positive("bandwidth", bandwidth)
        check(is_whole(seed) and 0 <= seed < 2**63, "seed", seed, "a whole number from 0 to 2⁶³ - 1")
        self.features, self.bandwidth, self.seed = features, float(bandwidth), seed

    def value(self, z: Tensor) -> Tensor:
        centred = self._features(_channels(z))[0]
        centred = centred - centred.mean(1, keepdim=True)
        pairs = _gram_square(_side_by_side(centred)) - _gram_square(centred)
        return 0.5 * pairs / (len(z) - 1) ** 2

    def gradient_against(self, z: Tensor, reference: Tensor) -> Tensor:
        features, slopes, frequencies = self._features(_channels(z))
        others = features if z is reference else self._features(_channels(reference))[0]
        mean = others.mean(1, keepdim=True)
        features, others = features - mean, others - mean
        # dR/dF̃_i = 2 (B-1)⁻² (F̃F̃ᵀF̃_i - F̃_iF̃_iᵀF̃_i), centred already.
        everyone = _triple(_side_by_side(features), _side_by_side(others))
        everyone = everyone.unflatten(1, (len(features), -1)).transpose(0, 1)
        itself = _triple(features, others)
        pull = 2 * (everyone - itself) / (len(reference) - 1) ** 2
        return _uncharted((pull * slopes) @ frequencies.mT, z)

    def _features(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`F` and its slope in the phase, `(m, B, D)`, and the scaled frequencies, `(n, D)`."""
        generator = torch.Generator().manual_seed(self.seed)
        n = z.shape[2]
        frequencies = torch.randn(n, self.features, generator=generator, dtype=torch.float64).to(z)
        frequencies = frequencies / (self.bandwidth * math.sqrt(n))
        offset = torch.rand(self.features, generator=generator, dtype=torch.float64).to(z) * (2 * math.pi)
        phase = z @ frequencies + offset
        amplitude = math.sqrt(2 / self.features)
        return amplitude * torch.cos(phase), -amplitude * torch.sin(phase), frequencies

    def extra_repr(self) -> str:
        return f"features={self.features}, bandwidth={self.bandwidth}, seed={self.seed}"


def _inverse_norms(rows: Tensor) -> Tensor:
    """`1/‖·‖` of every column of `(B, m)`; 0 for columns of zeros."""
    squares = rows.square().sum(0)
    zero = squares <= torch.finfo(rows.dtype).tiny
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).rsqrt())


def _channels(z: Tensor) -> Tensor:
    """`(m, B, n)`: channels first, their pixels last."""
    return z.flatten(2).transpose(0, 1) if z.dim() > 2 else z.mT[..., None]


def _uncharted(features: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_channels`."""
    return features.transpose(0, 1).reshape(like.shape)


def _centred(kernel: Tensor, reference: Tensor) -> Tensor:
    """Rows of `HKH` for kernel values `(m, A, B)` against a reference with kernel `(m, B, B)`."""
    columns = reference.mean(1, keepdim=True)
    return kernel - kernel.mean(2, keepdim=True) - columns + columns.mean(2, keepdim=True)


def _side_by_side(features: Tensor) -> Tensor:
    """`(m, B, D) ↦ (B, m D)`."""
    return features.transpose(0, 1).flatten(1)


def _gram_square(x: Tensor) -> Tensor:
    """`‖X Xᵀ‖_F²` (summed over a batch of `X`), from the smaller of the two Gram matrices."""
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return gram.square().sum()


def _triple(x: Tensor, y: Tensor) -> Tensor:
    """`X YᵀY`, through the smaller product."""
    return (x @ y.mT) @ y if y.shape[-2] <= y.shape[-1] else x @ (y.mT @ y)
