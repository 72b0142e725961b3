"""A similarity of the user's own, differentiated automatically."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opteq.equation import Gradients
from opteq.errors import ConfigError, ShapeError
from opteq.objectives.similarity import Similarity, SimilarityLinearization
from opteq.results import Certificate
from opteq.tensors.lanczos import extreme_ritz_values

_LANCZOS_STEPS = 30


@dataclass(frozen=True, eq=False)
class AutogradSimilarity(Similarity):
    """`S(y; c)` computed by a module `(y, c) ↦ (batch,)` that is twice differentiable.

    Gradients, products with the Hessian (by differentiating twice) and pullbacks come from autograd;
    the bound on the Hessian is an estimate.

    Attributes:
        module: computes `S`, every sample on its own.
        injection: `c`, `(batch, ...)`.
        parameters: values for the parameters of `module`, in the order of `module.named_parameters()`.
        shape: of the state, without the batch.
    """

    module: nn.Module
    injection: Tensor
    parameters: tuple[Tensor, ...]
    shape: tuple[int, ...]

    def initial(self) -> Tensor:
        return self.injection.new_zeros(self.injection.shape[0], *self.shape)

    def value(self, y: Tensor) -> Tensor:
        names = (name for name, _ in self.module.named_parameters())
        parameters = dict(zip(names, self.parameters, strict=True))
        value = functional_call(self.module, parameters, (y, self.injection))
        if not isinstance(value, Tensor) or value.shape != y.shape[:1] or value.is_complex():
            tensor = isinstance(value, Tensor)
            got = f"{tuple(value.shape)} of {value.dtype}" if tensor else type(value).__name__
            raise ShapeError(
                f"Expected the similarity to give one real number per sample, shape ({len(y)},), got {got}."
            )
        return value

    def gradient(self, y: Tensor) -> Tensor:
        attached = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            return self._gradient(y if attached and y.requires_grad else _leaf(y), attached)

    def linearize(self, y: Tensor) -> SimilarityLinearization:
        return _AutogradLinearization(self, y)

    def hessian_bound(self, y: Tensor | None = None) -> Certificate:
        """An estimate of `‖∇²S‖` at `y` by Lanczos' method; without `y`, at 0 and at `∇S(0)`."""
        if y is not None:
            smallest, largest = self.hessian_range(y)
            norm = torch.maximum(-smallest, largest)
            return Certificate(norm, "estimate", (f"{_LANCZOS_STEPS} steps of Lanczos' method settle.",))
        with torch.no_grad():
            start = self.initial()
            parts = [self.hessian_bound(state) for state in (start, self.gradient(start))]
        value = torch.maximum(parts[0].value, parts[1].value)
        elsewhere = "The Hessian is no larger elsewhere than at the start and at ∇S(0)."
        return Certificate(value, "estimate", (*parts[0].assumptions, elsewhere))

    def hessian_range(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates of the smallest and of the largest eigenvalue of `∇²S(y)`, `(batch,)` in float64."""
        return extreme_ritz_values(self.linearize(y).product, y.detach(), _LANCZOS_STEPS)

    def check(self) -> None:
        """Look at one random state whether `S` is what the equations presume.

        Raises:
            ShapeError: if it does not give one real number per sample.
            ConfigError: if it is not differentiable in `y`, if it depends on tensors with a gradient
                that are neither its arguments nor its parameters, if it is random or changes its
                arguments, or if samples depend on each other.
        """
        with torch.inference_mode(False), torch.enable_grad():
            detached = self.with_tensors(tuple(t.detach() for t in self.tensors))
            y = torch.randn(self.initial().shape, generator=torch.Generator().manual_seed(0))
            y = y.to(self.injection)
            arguments = y, detached.injection
            versions = [t._version for t in arguments]
            once = detached.value(y)
            if versions != [t._version for t in arguments]:
                raise ConfigError(
                    "The similarity changes its arguments in place; let it compute something new, with relu"
                    " in place of relu_."
                )
            if once.requires_grad:
                raise ConfigError(
                    "The similarity depends on trainable tensors that are not its parameters; make it an"
                    " nn.Module that has them as parameters or in submodules."
                )
            if not torch.allclose(once, detached.value(y), equal_nan=True):
                raise ConfigError(
                    "The similarity gives another value when it is called again; leave out what is random,"
                    " such as dropout in training mode."
                )
            if not detached.value(y.requires_grad_()).requires_grad:
                raise ConfigError("Expected a similarity that is differentiable in its first argument.")
            for sample in {0, len(y) - 1} if len(y) else ():
                # In the places of all others too: also what is detached may depend on these.
                like = replace(detached, injection=_repeated(detached.injection, sample))
                alone = like.value(_repeated(y, sample))
                if not torch.allclose(once[sample], alone[sample], equal_nan=True):
                    raise ConfigError(
                        "The similarity of one sample depends on others; sum over all dimensions but the"
                        " first, and leave out batch norm in training mode."
                    )

    def _gradient(self, y: Tensor, create_graph: bool) -> Tensor:
        value = self.value(y).sum()
        return torch.autograd.grad(value, y, create_graph=create_graph, materialize_grads=True)[0]


@torch.no_grad()
def _leaf(y: Tensor) -> Tensor:
    """`y` to be differentiated by; a view, unlike what is detached, keeps a tangent of forward mode."""
    return ordinary(y).view_as(y).requires_grad_()


def ordinary(t: Tensor) -> Tensor:
    """`t`, or a copy of one of inference mode, which autograd refuses, for use outside of that."""
    with torch.inference_mode(False):
        return t.clone() if t.is_inference() else t


def _repeated(batch: Tensor, sample: int) -> Tensor:
    """One sample in all places of the batch."""
    return batch.detach()[sample].expand_as(batch).clone()


class _AutogradLinearization(SimilarityLinearization):
    """Keeps the graph of `∇S` at one state and differentiates it again for each product."""

    def __init__(self, similarity: AutogradSimilarity, y: Tensor) -> None:
        with torch.enable_grad():
            self._y = y.detach().requires_grad_()
            self._leaves = tuple(t.detach().requires_grad_() for t in similarity.tensors)
            self._gradient = similarity.with_tensors(self._leaves)._gradient(self._y, create_graph=True)

    def gradient(self) -> Tensor:
        return self._gradient.detach()

    def product(self, v: Tensor) -> Tensor:
        (product,) = self._pull(v, (self._y,))
        return torch.zeros_like(v) if product is None else product

    def pullback(self, u: Tensor) -> Gradients:
        return self._pull(u, self._leaves)

    def _pull(self, v: Tensor, targets: tuple[Tensor, ...]) -> Gradients:
        if not self._gradient.requires_grad:  # S is linear in y, with constant coefficients
            return (None,) * len(targets)
        return torch.autograd.grad(self._gradient, targets, v, retain_graph=True, allow_unused=True)
