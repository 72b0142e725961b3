"""Which parts of an image speak for a class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.evaluation.passes import eval_mode
from opteq.layer import EquilibriumLayer
from opteq.results import State, tensors_of


def grad_cam(
    network: nn.Module, images: Tensor, classes: Tensor | None = None, module: nn.Module | None = None
) -> Tensor:
    """Grad-CAM (Selvaraju et al. 2017): `relu(Σ_k a_k A_k)`, `a_k` the mean over pixels of `∂logit/∂A_k`.

    `A` are the features that a module of the network gives, and the sum is enlarged to the size of the
    image. The branches of an equilibrium are features of different sizes: their sums are enlarged, and
    added before the `relu`.

    The network runs in eval mode and is left in the mode it was in; its parameters get no gradients.

    Args:
        network: maps images to logits `(batch, classes)`.
        images: `(batch, channels, height, width)`, normalised.
        classes: `(batch,)` the classes to explain; the predicted ones unless given.
        module: the part of the network that gives the features; unless given, the last equilibrium layer
            or, where there is none, the last module with features of more than one pixel.

    Returns:
        `(batch, height, width)` numbers of at least zero.

    Raises:
        ConfigError: if the module gives no features with height and width, or there is no such module.
    """
    with eval_mode(network), torch.enable_grad():
        # Features depend on the image also where all parameters are frozen.
        images = images.detach().requires_grad_()
        logits, features = _run(network, images, module)
        if classes is None:
            classes = logits.argmax(1)
        chosen = logits.gather(1, classes[:, None]).sum()
        gradients = torch.autograd.grad(chosen, features, allow_unused=True, materialize_grads=True)
    size = tuple(images.shape[2:])
    maps = [
        F.interpolate((g.mean((2, 3), keepdim=True) * a.detach()).sum(1, keepdim=True), size, mode="bilinear")
        for a, g in zip(features, gradients, strict=True)
    ]
    return torch.stack(maps).sum(0)[:, 0].relu()


def _run(network: nn.Module, images: Tensor, module: nn.Module | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits, and the last features of `module` or of the one chosen for want of it."""
    layers = [m for m in network.modules() if isinstance(m, EquilibriumLayer)]
    watched = [module] if module is not None else layers or list(network.modules())[1:]
    seen: list[tuple[Tensor, ...]] = []

    def note(_: nn.Module, inputs: object, output: State) -> None:
        if all(isinstance(t, Tensor) and t.dim() == 4 and t[0, 0].numel() > 1 for t in tensors_of(output)):
            seen.append(tensors_of(output))

    hooks = [m.register_forward_hook(note) for m in watched]
    try:
        logits = network(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        what = "the network has none" if module is None else f"{type(module).__name__} gave none"
        raise ConfigError(f"Expected features (batch, channels, height, width) to look at, but {what}.")
    return logits, seen[-1]
