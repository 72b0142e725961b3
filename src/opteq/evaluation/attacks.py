"""Adversarial attacks on classifiers, in the space of pixels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.evaluation.ascent import Ball, Height, Measure, falling_steps, steps_of_one_size
from opteq.evaluation.display import Normalization, channelwise
from opteq.evaluation.passes import eval_mode, refuse_non_finite
from opteq.options import require, strict_options


@strict_options
@dataclass(frozen=True)
class PGD:
    """Projected gradient descent in the `l∞` ball (Madry et al. 2018): `steps` steps of signed gradients.

    `x ← clip(x + α sign(∇ loss))`, clipped to `[x_0 - ε, x_0 + ε]` and to the range of pixels. Sizes are
    those of pixels in [0, 1], whatever normalisation the network's images have.

    The loss is `m = log Σ_{j≠y} exp l_j - l_y` of the logits `l`. The cross entropy is `log(1 + exp m)`: its
    gradient has the same direction, but vanishes among floating-point numbers where the network is sure.

    To judge how robust a network is, take many steps of falling size, and restarts, as in
    `PGD(steps=100, step_size=None, restarts=5)`: steps of one size, and one loss, overstate it (Croce & Hein
    2020). These are the steps of their Auto-PGD: from `2ε` on, halved where they no longer help, with
    momentum, and what comes out is the image of all on the way whose wrong class led furthest.

    Args:
        steps: number of gradient steps.
        epsilon: `ε`, the largest change of a pixel.
        step_size: `α`; None for steps that are halved where they no longer help, see above.
        random_start: start from a random point of the ball rather than from the image.
        restarts: attacks on an image, until one changes its class. After the first, which is on all wrong
            classes together, each is on the difference to one of them, `m = l_j - l_y` (Gowal et al. 2019):
            in turn to the one that has come closest so far, the second and the third closest.
    """

    steps: int = 3
    epsilon: float = 8 / 255
    step_size: float | None = 2 / 255
    random_start: bool = True
    restarts: int = 1

    def __post_init__(self) -> None:
        require(self.steps >= 1, self, "steps", "at least 1")
        require(self.epsilon >= 0, self, "epsilon", "at least 0")
        require(self.step_size is None or self.step_size > 0, self, "step_size", "positive, or None")
        require(self.restarts >= 1, self, "restarts", "at least 1")

    def __call__(
        self, network: nn.Module, images: Tensor, labels: Tensor, normalization: Normalization
    ) -> Tensor:
        """Images near `images` on which `network`, in eval mode, has a large cross entropy.

        Parameters get no gradients, and the network is left in the mode it was in.

        Args:
            network: maps images to logits.
            images: `(batch, channels, height, width)`, normalised.
            labels: `(batch,)` true classes.
            normalization: the mean and standard deviation that were applied to the images.

        Raises:
            ConfigError: for a network of less than two classes.
            NonFiniteError: if the network answers NaN or infinity.
        """
        return self.attack(network, images, labels, normalization)[0]

    def attack(
        self, network: nn.Module, images: Tensor, labels: Tensor, normalization: Normalization
    ) -> tuple[Tensor, Tensor]:
        """The attacked images, and `(batch,)` whether the gradient was zero in a step of every attack.

        Such an image was not attacked to the full: that it is classified rightly shows nothing.
        """
        mean, deviation = (v.to(images) for v in channelwise(normalization))
        # The ball, and the range of pixels, as the network sees them.
        images, radius = images.detach(), self.epsilon / deviation
        lowest = torch.maximum(images - radius, -mean / deviation)
        highest = torch.minimum(images + radius, (1 - mean) / deviation)
        attacked = images.clone()
        blind = torch.ones(len(images), dtype=torch.bool, device=images.device)
        left = torch.arange(len(images), device=images.device)
        # How close the wrong classes have come, for the images that are left.
        leads = torch.tensor(-math.inf, dtype=torch.float64, device=images.device)
        with eval_mode(network):
            for restart in range(self.restarts):
                rival = None
                if restart:
                    with torch.no_grad():
                        found = _leads(network(attacked[left]), labels[left])
                    right = found.amax(1) <= 0
                    left, leads = left[right], torch.maximum(leads, found)[right]
                    closest = leads.argsort(1, descending=True)
                    rival = closest[:, (restart - 1) % min(3, leads.shape[1] - 1)]
                if not len(left):
                    break
                attacked[left], unseen = self._attack_once(
                    partial(_measure, network, labels[left], rival),
                    images[left],
                    Ball(lowest[left], highest[left], 1 / deviation),
                )
                blind[left] &= unseen
        return attacked, blind

    def _attack_once(self, measure: Measure, images: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:
        start = images
        if self.random_start:
            start = ball.clip(images + self.epsilon * ball.unit * (2 * torch.rand_like(images) - 1))
        if self.step_size is None:
            return falling_steps(measure, start, ball, self.steps, 2 * self.epsilon)
        return steps_of_one_size(measure, start, ball, self.steps, self.step_size)


def attacked_accuracy(
    network: nn.Module, loader: Iterable[Sequence[Tensor]], attack: PGD, normalization: Normalization
) -> float:
    """Share of the samples that `network`, in eval mode, still classifies rightly under `attack`.

    A warning says how many of these had no gradient to attack along.

    Args:
        network: maps images to logits; left in the mode it was in.
        loader: batches `(images, labels)`, normalised.
        attack: the attack.
        normalization: the mean and standard deviation that were applied to the images.
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    hits = samples = unshown = 0
    with eval_mode(network):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            attacked, blind = attack.attack(network, images, labels, normalization)
            with torch.no_grad():
                right = network(attacked).argmax(1) == labels
            hits += int(right.sum())
            unshown += int((right & blind).sum())
            samples += len(labels)
    if unshown:
        warnings.warn(
            f"The gradient of {unshown} of {samples} images was zero, so that their classes withstood no"
            " attack: the accuracy overstates how robust the network is.",
            stacklevel=2,
        )
    return hits / max(samples, 1)


def _leads(logits: Tensor, labels: Tensor) -> Tensor:
    """`(batch, classes)` logits less that of the true class, for which itself it is minus infinity."""
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ConfigError(
            f"Expected logits of two classes or more to attack, got shape {tuple(logits.shape)}."
        )
    logits = logits.double()
    return (logits - logits.gather(1, labels[:, None])).scatter(1, labels[:, None], -math.inf)


def _measure(network: nn.Module, labels: Tensor, rivals: Tensor | None, images: Tensor) -> Height:
    """With the logarithmic odds of all wrong classes, or the logit of one, against the true class as loss."""
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        logits = network(images)
        refuse_non_finite(logits)
        leads = _leads(logits, labels)
        loss = leads.logsumexp(1) if rivals is None else leads.gather(1, rivals[:, None])[:, 0]
        # Summed, so that every sample's gradient is that of its own loss.
        (gradient,) = torch.autograd.grad(loss.sum(), images)
    return Height(loss.detach(), gradient, leads.detach().amax(1))
