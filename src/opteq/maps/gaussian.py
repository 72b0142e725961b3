"""The Gaussian kernel map of KerDEQ and GEQ."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from opteq.activations import Activation, get_activation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, Injection, bind_to, check_max_norm, expect_operator
from opteq.maps.similarityequation import SimilarityEquation
from opteq.maps.watch import Watch
from opteq.objectives.gaussiansimilarity import ADAPTIVE_NUMERATOR, GaussianSimilarity
from opteq.objectives.patches import Patches, WholeSample
from opteq.operators.base import LinearOperator
from opteq.options import check, check_counts, check_flag, is_number
from opteq.results import State
from opteq.tensors.precision import full_precision

# A patch that starts (nearly) at its injection must not make every other weight underflow.
_SMALLEST_SHARE = 1e-2
_SMALLEST_WEIGHT = 1e-6
_ADAPTIVE = ("adaptive", "mean")


class GaussianMap(EquilibriumMap):
    """`y = σ(Wᵀ merge(e^{-γ‖r_i W_h‖²} r_i W_h W_hᵀ))`, `r_i = patch_i(U x + b - W y)`.

    The map of GEQ (Li et al. 2023, Algorithm 1) and KerDEQ.

    Without patches, `y = σ(e^{-γ‖c - W y‖²} Wᵀ(c - W y))`. Equilibria are stationary for
    `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)` with the Gaussian similarity `S`. A fixed `γ` suits distances of one size
    only: over whole feature maps the weight underflows, and `y` with it. `bind` warns of that: it looks
    at the first batch in eval mode, and at the first and every twentieth in training.

    `gamma="adaptive"` sets `γ = 0.2 / M` per sample, with `M` the smallest patch distance at the
    start `y = 0`, so that the nearest patch starts with weight `e^{-0.2}`; `M` counts as at least a
    hundredth of the mean distance. With `gamma="mean"`, which is not in the papers, `M` is the mean
    distance, so that no single flat patch takes the weight from all others. Either `γ` is constant
    during the solve and differentiated through, in training unless `detach_gamma`.

    State and readout: `y`, of shape `(batch, W.in_channels, ...)`.

    Args:
        W: opteq operator from the state to the mid channels.
        U: opteq operator (or any module) from the input to the mid channels.
        patches: how the mid channels are split; None for the plain kernel on the whole sample.
        hidden: `c_hid`, columns of `W_h`, which is used with patches only.
        gamma: a positive number, `"adaptive"` or `"mean"`.
        detach_gamma: treat the adaptive `γ` as a constant when differentiating in training. In eval mode
            gradients are the true ones: those of an attack would overstate how robust a network is.
        activation: name of an activation in `opteq.activations`, or an object.
        bias: whether there is a `b`.
        max_norm: ceiling on `‖W‖₂`; `‖W_h‖₂` is kept below 1. `L_σ ‖W‖²‖W_h‖² < 1` makes the map a
            contraction. None trusts the weights (both of them) to stay small by themselves.

    Raises:
        ConfigError: for a `W` that is no opteq operator, channels that do not match, or options out
            of range.
    """

    def __init__(
        self,
        W: LinearOperator,
        U: nn.Module,
        patches: Patches | None = None,
        hidden: int = 64,
        gamma: float | str = "adaptive",
        detach_gamma: bool = False,
        activation: str | Activation = "relu",
        bias: bool = True,
        max_norm: float | None = 0.97,
    ) -> None:
        super().__init__()
        expect_operator(W, "W")
        fits = gamma in _ADAPTIVE or (is_number(gamma) and gamma > 0)
        check(fits, "gamma", gamma, "a positive number, 'adaptive' or 'mean'")
        fits = patches is None or isinstance(patches, Patches)
        check(fits, "patches", patches, "Patches(channels, size) or None")
        if patches is not None and W.out_channels % patches.channels:
            raise ConfigError(
                f"Expected the {W.out_channels} channels of `W` to divide into patches of {patches.channels}."
            )
        check_counts(hidden=hidden)
        check_flag("detach_gamma", detach_gamma)
        check_max_norm(max_norm)
        self.W = W
        self.injection = Injection(U, W.out_channels, bias)
        self.patches = WholeSample() if patches is None else patches
        self.activation = get_activation(activation)
        self.gamma, self.detach_gamma, self.max_norm = gamma, detach_gamma, max_norm
        self._watch, self._seen = Watch(), False
        self.projection = None
        if patches is not None:
            d = patches.dimension
            self.projection = nn.Parameter(torch.randn(d, hidden) / (math.sqrt(d) + math.sqrt(hidden)))

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return (self.injection,)

    def bind(self, x: State, error: float = 0.0) -> SimilarityEquation:
        c = self.injection(x, error=error)
        self.patches.check(c.shape)
        W, gram = bind_to(self.W, c, self.max_norm, error), self._gram()
        rule = self.gamma if isinstance(self.gamma, str) else ""
        similarity = GaussianSimilarity(c, self._gamma(c, gram), gram, W, self.patches, rule)
        return SimilarityEquation(similarity, self.activation)

    def _gram(self) -> Tensor | None:
        """`G = W_h W_hᵀ` with `‖W_h‖₂ ≤ 1`."""
        if self.projection is None:
            return None
        with full_precision(self.projection.device):
            gram = self.projection @ self.projection.mT
            if self.max_norm is None:
                return gram
            wide = gram.to(torch.promote_types(gram.dtype, torch.float32))
            return gram / torch.linalg.matrix_norm(wide, 2).clamp(min=1.0).to(gram.dtype)

    def _gamma(self, c: Tensor, gram: Tensor | None) -> Tensor:
        if isinstance(self.gamma, str):
            return self._adaptive_gamma(c, gram)
        gamma = float(self.gamma)
        # In eval mode once: there they stay as they are.
        if self.training or not self._seen:
            self._seen = True
            if self._watch.notices(self.training, lambda: self._lost(gamma, c, gram) > 0):
                warnings.warn(
                    f"With gamma={gamma:g} the largest weight at the start is below {_SMALLEST_WEIGHT:g}"
                    f" for {self._lost(gamma, c, gram)} of {len(c)} samples, where y is next to 0 and"
                    " hardly learns; use gamma='adaptive', or patches.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return c.new_full((c.shape[0],), gamma)

    def _lost(self, gamma: float, c: Tensor, gram: Tensor | None) -> int:
        """Samples whose nearest patch starts with a weight `e^{-γd}` that is next to nothing."""
        exponents = gamma * self._distances(c, gram).detach().amin(1)
        return int((exponents > -math.log(_SMALLEST_WEIGHT)).sum())

    def _distances(self, c: Tensor, gram: Tensor | None) -> Tensor:
        """`(batch, n)` distances of the patches at the start `y = 0`."""
        with full_precision(c.device):
            start = self.patches.split(c)
            return (start * (start if gram is None else start @ gram)).sum(-1)

    def _adaptive_gamma(self, c: Tensor, gram: Tensor | None) -> Tensor:
        distance = self._distances(c, gram)
        with full_precision(c.device):
            size = distance.mean(1)
            if self.gamma == "adaptive":
                size = torch.maximum(distance.amin(1), _SMALLEST_SHARE * size)
            gamma = ADAPTIVE_NUMERATOR / size.clamp(min=torch.finfo(c.dtype).eps)
        return gamma.detach() if self.detach_gamma and self.training else gamma

    def extra_repr(self) -> str:
        return (
            f"patches={self.patches}, gamma={self.gamma}, activation={self.activation},"
            f" max_norm={self.max_norm}"
        )
