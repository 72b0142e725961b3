"""The Gaussian similarity of KerDEQ and GEQ, plain and with patches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import Gradients
from opteq.native.forces import forces_in_place
from opteq.objectives.patches import Patches, WholeSample
from opteq.objectives.similarity import Similarity, SimilarityLinearization
from opteq.operators.bound import BoundOperator
from opteq.results import Certificate
from opteq.tensors.layouts import zero_state
from opteq.tensors.tracing import recorded

ADAPTIVE_NUMERATOR = 0.2
"""`γM` under the adaptive rules: a patch at the distance `M` starts with the weight `e^{-0.2} = 0.82`."""

CONCAVITY = 2 * math.exp(-1.5)
"""`A = e^{-u}(I - 2γrrᵀ)` with `u = γ‖r‖²` has no eigenvalue below minus this, reached at `u = 3/2`."""

# `max d^{3/2}e^{-γd} · ‖dγ/dc‖` in units of `‖W_h‖²`, with γ = 0.2/M.
_ADAPTIVE_PUSH = 2 * (1.5 / math.e) ** 1.5 / math.sqrt(ADAPTIVE_NUMERATOR)


@dataclass(frozen=True, eq=False)
class GaussianSimilarity(Similarity):
    """`S(y) = (1/2γ) Σ_i exp(-γ d_i)`, `d_i = r_iᵀ G r_i`, `r_i = patch_i(c - W y)`.

    `G = W_h W_hᵀ` is the Gram matrix of the patch projection (all that the map needs of `W_h`), or
    None for the identity. With `e_i = exp(-γ d_i)`

        ∇S(y) = Wᵀ merge(e_i G r_i)
        ∇²S(y) = -Wᵀ A W,    A_i = e_i (G - 2γ G r_i r_iᵀ G).

    (Li et al. 2023, Eq. 7 and Algorithm 1; `c` lives where `W y` does.)

    Attributes:
        injection: `c`, `(batch, mid, ...)`.
        gamma: `γ`, `(batch,)`.
        gram: `G`, `(d, d)`, or None.
        W: the operator from the state to the mid channels, bound.
        patches: how the mid channels are split.
        rule: by which `γ` follows the injection, `"adaptive"` or `"mean"`, see `rates`; "" for a fixed one.
    """

    owns_gradient = True

    injection: Tensor
    gamma: Tensor
    gram: Tensor | None
    W: BoundOperator
    patches: Patches | WholeSample
    rule: str = ""

    def initial(self) -> Tensor:
        return zero_state(self.injection, self.W.domain)

    def value(self, y: Tensor) -> Tensor:
        return self._at(y).weight.sum((1, 2)) / (2 * self.gamma)

    def gradient(self, y: Tensor) -> Tensor:
        return self._pool(self._force(self._offset(y)))

    def initial_gradient(self) -> Tensor:
        return self._pool(self._force(-self.injection))

    def attention(self, y: Tensor) -> Tensor:
        """Weights `e_i = exp(-γ d_i)` of the patches, `(batch, n)`: 1 where `W y` equals `c`."""
        return self._at(y).weight[..., 0]

    def linearize(self, y: Tensor) -> SimilarityLinearization:
        return _GaussianLinearization(self, y)

    def hessian_bound(self, y: Tensor | None = None) -> Certificate:
        """`‖W‖²‖W_h‖²` everywhere; at `y`, times `max(e^{-u_min}, 2e^{-3/2})` with `u = γ d`.

        On a patch `A_i` has, in the `G` metric, the eigenvalues `e^{-u}` and `(1 - 2u) e^{-u}`, and
        `-2e^{-3/2} ≤ (1 - 2u) e^{-u} ≤ 1` with the minimum at `u = 3/2`.
        """
        scale = self.W.norm_bound().square()
        if self.gram is not None:
            scale = scale * torch.linalg.matrix_norm(self.gram.detach().double(), 2) * (1 + 1e-12)
        factor = torch.ones(len(self.injection), dtype=torch.float64, device=self.injection.device)
        if y is not None:
            closest = self._at(y).weight.detach().double().amax((1, 2))
            factor = closest.clamp(min=CONCAVITY)
        return Certificate(scale * factor, "bound", (self.W.norm_assumption,))

    def largest_eigenvalue_bound(self) -> Certificate:
        """`2e^{-3/2}‖W‖²‖W_h‖²`: the Hessian is mostly negative."""
        bound = self.hessian_bound()
        return replace(bound, value=CONCAVITY * bound.value)

    def rates(self, activation: Activation, push: float, everywhere: bool = False) -> tuple[float, float]:
        """`(L_σ s‖W_h‖²‖U‖, 2e^{-3/2}L_σs²‖W_h‖²)` with `s = ‖W‖`, and more for an adaptive `γ`.

        Slopes `D` of the activation in `[0, L_σ]` give `dy = D^½(I + D^½WᵀAWD^½)⁻¹D^½WᵀA dc` with
        `-2e^{-3/2}I ⪯ A ⪯ I`; patches put `‖W_h‖²` beside `s` and `s²`. Any admissible activation will do,
        where Li et al. 2023, Proposition 3, ask for a ReLU. An adaptive `γ = 0.2/M`, which changes with `x`,
        makes the first `1 + 2κ (3/2e)^{3/2}/√0.2` times as large, where `κ = √N` with `M` the smallest of `N`
        distances, and 1 with `M` their mean: a distance changes by at most `2√d‖W_h‖‖dc_i‖`, so that
        `‖dγ‖ ≤ 0.4M^{-3/2}‖W_h‖‖dc‖κ/√N`, and the forces `e^{-γd}G r` of a patch change with `γ` at most by
        `d^{3/2}e^{-γd}‖W_h‖ ≤ (3/2eγ)^{3/2}‖W_h‖`, those of all by `√N` times that: `γ` cancels.
        """
        s = self.W.norm_bound().item()
        steepness = activation.lipschitz * self.hessian_bound().value.max().item()
        if self.rule:
            sway = 1.0 if self.rule == "mean" else math.sqrt(self.patches.split(self.injection).shape[1])
            push *= 1 + sway * _ADAPTIVE_PUSH
        return steepness / s * push if s else 0.0, CONCAVITY * steepness

    def project(self, patches: Tensor) -> Tensor:
        """`G r` for every patch."""
        return patches if self.gram is None else patches @ self.gram

    def weight(self, distance: Tensor) -> Tensor:
        """`e_i = exp(-γ d_i)` for distances `(batch, n, 1)`."""
        return torch.exp(-self.gamma[:, None, None] * distance)

    def _offset(self, y: Tensor) -> Tensor:
        """`W y - c`, so that it can be had without a second tensor; all else is even in its sign."""
        image = self.W(y)
        same = image.dtype == self.injection.dtype  # not so under autocast
        return image.sub_(self.injection) if same else image - self.injection

    def merge(self, patches: Tensor) -> Tensor:
        """The image of patches `(batch, n, d)`."""
        return self.patches.merge(patches, self.injection)

    def _force(self, offset: Tensor) -> Tensor:
        """The image of the `e_i G r_i`. Overwrites `offset`, whose patches `-r_i` may be views of it."""
        forces = self.in_place(offset)
        if forces is not None:
            return forces
        residual = self.patches.split(offset)
        projected = self.project(residual)
        product = residual * projected if projected is residual else _times(residual, projected)
        return self.merge(_times(projected, -self.weight(product.sum(-1, keepdim=True))))

    def in_place(self, image: Tensor, *state: Tensor) -> Tensor | None:
        """`forces_in_place` of compiled code, None where that is not the way."""
        if not isinstance(self.patches, Patches) or self.gram is None:
            return None
        cut = (self.patches.channels, self.patches.size)
        return forces_in_place(image, *cut, self.gram, self.gamma, *state, error=self.W.error)

    def _at(self, y: Tensor) -> _Distances:
        return _Distances(self, self.patches.split(self._offset(y)))

    def _pool(self, image: Tensor) -> Tensor:
        return self.W.adjoint(image).to(image.dtype)


class _Distances:
    """Patches of `W y - c`, their projections by `G`, distances `d` and weights `e^{-γd}`."""

    def __init__(self, similarity: GaussianSimilarity, residual: Tensor) -> None:
        self.residual = residual
        self.projected = similarity.project(residual)
        self.distance = torch.linalg.vecdot(residual, self.projected)[..., None]
        self.weight = similarity.weight(self.distance)


class _GaussianLinearization(SimilarityLinearization):
    def __init__(self, similarity: GaussianSimilarity, y: Tensor) -> None:
        self._similarity, self._y = similarity, y
        self._at = similarity._at(y)
        self._force = -self._at.weight * self._at.projected

    def gradient(self) -> Tensor:
        return self._similarity._pool(self._similarity.merge(self._force))

    def product(self, v: Tensor) -> Tensor:
        s, at = self._similarity, self._at
        lifted = s.W(v)
        response = s.in_place(lifted, at.projected, at.weight)
        if response is None:
            patches = s.patches.split(lifted)
            response = s.merge(self._response(s.project(patches), self._overlap(patches)))
        return s._pool(response)

    def pullback(self, u: Tensor) -> Gradients:
        # ⟨u, ∇S⟩ = -Σ e_i q_iᵀG r_i with q = patch(W u), r = patch(W y - c); r, G, γ and W enter as below.
        s, at = self._similarity, self._at
        lifted = s.patches.split(s.W(u))
        overlap = self._overlap(lifted)
        response = s.merge(self._response(s.project(lifted), overlap))
        gamma = (at.distance * at.weight * overlap).sum((1, 2))
        force = s.merge(self._force)
        weights = s.W.weight_gradient((u, force), (self._y, response))
        if s.gram is None:
            return (-response, gamma, *weights)
        drift = _times(lifted.addcmul(s.gamma[:, None, None] * overlap, at.residual, value=-1), -at.weight)
        gram = drift.flatten(0, 1).mT @ at.residual.flatten(0, 1)
        return (-response, gamma, gram, *weights)

    def _overlap(self, lifted: Tensor) -> Tensor:
        """`q_iᵀG r_i` for patches `q`."""
        return torch.linalg.vecdot(lifted, self._at.projected)[..., None]

    def _response(self, projected: Tensor, overlap: Tensor) -> Tensor:
        """`-A q`, the change of the forces, for `q` with `G q = projected` and `q_iᵀG r_i = overlap`.

        Overwrites `projected`.
        """
        shift = -2 * self._similarity.gamma[:, None, None] * overlap
        return _times(projected, -self._at.weight).addcmul_(shift, self._force)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """`a b`, in the memory of `a` unless a graph needs that: large tensors cost more to allocate."""
    return a * b if recorded() or a.dtype != b.dtype else a.mul_(b)
