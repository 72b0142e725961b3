"""Ways to climb a loss among the images of a ball by signed gradients, in steps of one or of falling size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ball:
    """Images whose pixels lie between two bounds, in a space that may be normalised.

    Attributes:
        lowest: `(batch, channels, height, width)`, what the pixels are at least.
        highest: what they are at most.
        unit: how long the unit of pixels is in that space, channel by channel.
    """

    lowest: Tensor
    highest: Tensor
    unit: Tensor

    def clip(self, images: Tensor) -> Tensor:
        return images.clamp(self.lowest, self.highest)

    def step(self, images: Tensor, size: float | Tensor, gradient: Tensor) -> Tensor:
        """`clip(x + α sign(∇ loss))`, where `α` is in units of pixels."""
        return self.clip(images + size * self.unit * gradient.sign())


@dataclass(frozen=True, slots=True)
class Height:
    """What an attack knows of a batch of images.

    Attributes:
        loss: `(batch,)` what is to rise.
        gradient: of each loss by its image.
        lead: `(batch,)` how far the likeliest wrong class is ahead of the true one; positive where the
            network is wrong.
    """

    loss: Tensor
    gradient: Tensor
    lead: Tensor

    @property
    def blind(self) -> Tensor:
        """`(batch,)`, where there is no direction to go in."""
        return ~self.gradient.flatten(1).any(1)


Measure = Callable[[Tensor], Height]


def steps_of_one_size(
    measure: Measure, start: Tensor, ball: Ball, steps: int, size: float
) -> tuple[Tensor, Tensor]:
    """The images after the last step, and `(batch,)` whether one had no gradient in some step."""
    x = start
    blind = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for _ in range(steps):
        here = measure(x)
        blind |= here.blind
        x = ball.step(x, size, here.gradient)
    return x, blind


def falling_steps(
    measure: Measure, start: Tensor, ball: Ball, steps: int, size: float
) -> tuple[Tensor, Tensor]:
    """The images of all on the way whose wrong class led furthest, and whether one had no gradient.

    Auto-PGD (Croce & Hein 2020, Algorithm 1): with momentum,
    `x ← clip(x + 3/4 (step(x) - x) + 1/4 (x - x_before))`. At the `checkpoints` the size of an image's steps
    is halved, and it goes back to the highest point so far, if less than 3/4 of its steps since the last
    checkpoint went up, or if neither the size nor the highest loss has changed since then.
    """
    x = before = start
    here = measure(x)
    blind = here.blind
    kept, lead = x, here.lead
    top, summit = x, here
    sizes = torch.full((len(x), *[1] * (x.dim() - 1)), size, dtype=x.dtype, device=x.device)
    rises = torch.zeros(len(x), device=x.device)
    halved, loss_then = torch.zeros_like(blind), here.loss
    last, ends = 0, set(checkpoints(steps))
    for k in range(1, steps + 1):
        moved = ball.step(x, sizes, here.gradient)
        if k > 1:
            moved = ball.clip(x + 0.75 * (moved - x) + 0.25 * (x - before))
        before, x, earlier = x, moved, here
        here = measure(x)
        blind |= here.blind
        rises += here.loss > earlier.loss
        kept, lead = _where(here.lead > lead, x, kept), torch.maximum(here.lead, lead)
        higher = here.loss > summit.loss
        top, summit = _where(higher, x, top), _choose(higher, here, summit)
        if k in ends:
            stuck = ~halved & (summit.loss == loss_then)
            halved = (rises < 0.75 * (k - last)) | stuck
            sizes = _where(halved, sizes / 2, sizes)
            x, here = _where(halved, top, x), _choose(halved, summit, here)
            rises, loss_then, last = torch.zeros_like(rises), summit.loss, k
    return kept, blind


def checkpoints(steps: int) -> Iterator[int]:
    """The steps of Auto-PGD after which sizes may be halved: `⌈p_j steps⌉` with `p = 0, 0.22, …`.

    `p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)`. In hundredths, which are exact.
    """
    earlier, p = 0, 22
    while p <= 100:
        yield math.ceil(p * steps / 100)
        earlier, p = p, p + max(p - earlier - 3, 6)


def _where(rows: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (chosen.dim() - 1)), chosen, others)


def _choose(rows: Tensor, chosen: Height, others: Height) -> Height:
    return Height(
        _where(rows, chosen.loss, others.loss),
        _where(rows, chosen.gradient, others.gradient),
        _where(rows, chosen.lead, others.lead),
    )
