"""Attacks the packaged network of digits from within its certified radii.

`python -m tests.theory.attacked_digits [IMAGES]` aims at the nine other classes of each test image, in ten
steps: 10,080 in each precision for 112 images, as by default.
"""

import sys
import time

import torch
from torch import Tensor, nn

import opteq
from opteq.data.digits import Digits
from opteq.theory.robustness import robust_radius

# An attack is of so many steps, and so many run together.
STEPS, TOGETHER = 10, 360
# Certified radii, 2e-4 to 6e-4 for the packaged network, after which attacks succeed: the bound is a product.
BEYOND = 1e4


def changed_predictions(classifier: nn.Module, images: Tensor, share: float, steps: int = STEPS) -> Tensor:
    """How often a step of each attack, `(images, 9)`, lies where the class is another one.

    Every other class is aimed at, by steps along the gradient of its lead on a sphere whose radius is a share
    of the certified one, with the classifier as it works.
    """
    with torch.no_grad():
        predicted = classifier(images).argmax(1).repeat_interleave(9)
    certified = robust_radius(classifier, images).to(images)
    x = images.repeat_interleave(9, dim=0)
    size = share * certified.repeat_interleave(9).view(-1, *[1] * (x.dim() - 1))
    target = (predicted + torch.arange(1, 10).repeat(len(images))) % 10
    changed = torch.zeros(len(x), dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    delta = 1e-3 * size * direction / norm(direction)
    for _ in range(steps):
        moved = (x + delta).requires_grad_()
        logits = classifier(moved)
        changed += logits.argmax(1) != predicted
        lead = logits.gather(1, target[:, None]) - logits.gather(1, predicted[:, None])
        (slope,) = torch.autograd.grad(lead.sum(), moved)
        step = delta + size * slope / norm(slope)
        delta = size * step / norm(step)
        if share < 1:
            # Rounding moves what is attacked as well.
            rounded = (x + delta).double() - x.double()
            assert (norm(rounded).flatten() <= certified.double().repeat_interleave(9)).all()
    return changed.view(-1, 9)


def norm(t: Tensor) -> Tensor:
    return t.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, *[1] * (t.dim() - 1))


def images_of_digits(count: int) -> Tensor:
    data = Digits()
    data.prepare_data()
    data.setup("test")
    return torch.cat([images for images, _ in data.test_dataloader()])[:count]


if __name__ == "__main__":
    count, network = int(sys.argv[1]) if sys.argv[1:] else 112, opteq.load("digits")
    for dtype in (torch.float32, torch.float64):
        network, images = network.to(dtype), images_of_digits(count).to(dtype)
        for share in (0.999, BEYOND):
            begin = time.monotonic()
            parts = images.split(TOGETHER // 9)
            changed = torch.cat([changed_predictions(network, part, share) for part in parts])
            print(
                f"{dtype}, {share:g} of the radius: {changed.numel()} attacks of {STEPS} steps,"
                f" {int((changed > 0).sum())} change a prediction, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
