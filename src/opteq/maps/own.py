"""The map of a similarity of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from opteq.activations import Activation, get_activation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, inject
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.autograd import AutogradSimilarity, ordinary
from opteq.options import check, check_counts, check_kind
from opteq.results import Certificate, State

_STATES = 3


class SimilarityMap(EquilibriumMap):
    """`y = σ(∇_y S(y; c))`, `c = U x`, for any differentiable `S`: bring your own.

    Equilibria are stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y; c)` (Li et al. 2023, Eq. 5). Autograd
    gives the gradient of `S`, the products with its Hessian that implicit differentiation needs, and
    the gradients to the parameters of `S`. A contraction is estimated, not certified.

    State and readout: `y`, of shape `(batch, channels, ...)`, with the height and width of `c`.

    Args:
        similarity: a module or a function `(y, c) ↦ (batch,)`, twice differentiable, each sample on its
            own. Parameters that are to be trained need a module.
        U: opteq operator or any module from the input to `c`.
        channels: of the state.
        activation: name of an activation in `opteq.activations`, or an object.

    Raises:
        ConfigError: for objects of the wrong kind.
    """

    def __init__(
        self,
        similarity: nn.Module | Callable[[Tensor, Tensor], Tensor],
        U: nn.Module,
        channels: int,
        activation: str | Activation = "relu",
    ) -> None:
        super().__init__()
        fits = callable(similarity) and not isinstance(similarity, type)
        check(fits, "similarity", similarity, "a function (y, c) or a module")
        check_kind(nn.Module, "U", U, "an opteq operator or a torch module")
        check_counts(channels=channels)
        self.similarity = similarity if isinstance(similarity, nn.Module) else _Function(similarity)
        self.U, self.channels = U, channels
        self.activation = get_activation(activation)
        # Whether `S` was looked at once, see `check_contraction`.
        self.checked = False

    def bind(self, x: State, error: float = 0.0) -> SimilarityEquation:
        equation = self._equation(x, error)
        if not self.checked:
            self._check(equation.detach())
        return equation

    def _equation(self, x: State, error: float) -> SimilarityEquation:
        c = ordinary(inject(self.U, x, error))
        similarity = AutogradSimilarity(
            self.similarity, c, tuple(self.similarity.parameters()), (self.channels, *c.shape[2:])
        )
        return SimilarityEquation(similarity, self.activation)

    def check_contraction(self, x: State) -> Certificate:
        """Estimate `L_σ‖∇²S‖` for each input, at the first states of the plain iteration; warns above 1.

        Also raises if `S` is not what the equation presumes (see `AutogradSimilarity.check`). The first
        `bind` does the same; set `checked` to spare it.
        """
        return self._check(self._equation(x, 0.0).detach())

    @torch.inference_mode(False)
    @torch.no_grad()
    def _check(self, equation: SimilarityEquation) -> Certificate:
        similarity = equation.similarity
        assert isinstance(similarity, AutogradSimilarity)
        similarity.check()
        start = equation.initial()
        state, at_start = equation(start), equation.contraction(start)
        finite = similarity.value(start).isfinite() & at_start.value.isfinite()
        finite &= state.isfinite().flatten(1).all(1)
        if not finite.all():
            raise ConfigError(
                "The similarity, its gradient or its Hessian is not finite at y = 0, where solves start, for"
                f" {int((~finite).sum())} of {len(finite)} inputs; keep what is under roots and logarithms"
                " away from 0, as in (y² + ε)^½."
            )
        self.checked = True
        norms = [at_start.value]
        for _ in range(_STATES - 1):
            norms.append(equation.contraction(state).value.nan_to_num(torch.inf))
            state = equation(state)
        norm = torch.stack(norms).amax(0)
        if len(norm) and norm.max() > 1:
            sample = int(norm.argmax())
            warnings.warn(
                f"The similarity makes no contraction at {int((norm > 1).sum())} of {len(norm)} inputs:"
                f" L_σ‖∇²S‖ is about {norm[sample].item():.3g} for sample {sample}. Its equilibrium need not"
                " be unique and plain iteration may fail; divide S by more than that, or use Anderson and"
                " watch the convergence.",
                RuntimeWarning,
                stacklevel=3,
            )
        elsewhere = f"The Hessian is no larger than at the first {_STATES} states of the plain iteration."
        return Certificate(norm, "estimate", (*at_start.assumptions, elsewhere))

    def extra_repr(self) -> str:
        return f"channels={self.channels}, activation={self.activation}"


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Tensor, c: Tensor) -> Tensor:
        return self.function(y, c)
