"""Accuracy under attacks of many sizes and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from opteq.evaluation.attacks import PGD, attacked_accuracy
from opteq.evaluation.display import Normalization, OfPixels
from opteq.evaluation.parts import Parts
from opteq.evaluation.passes import device_of, eval_mode

STEPS = (1, 2, 3, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Robustness:
    """Accuracy under attacks.

    Attributes:
        clean: without an attack.
        steps: numbers of steps of PGD.
        pgd: by `ε`, the accuracy for each number of steps.
        autoattack: by `ε`, the accuracy under AutoAttack; empty where it was not run.
    """

    clean: float
    steps: tuple[int, ...]
    pgd: dict[float, tuple[float, ...]]
    autoattack: dict[float, float]


def attack_accuracies(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    normalization: Normalization,
    epsilons: Sequence[float],
    restarts: int = 1,
    autoattack: bool = False,
    parts: Parts | None = None,
) -> Robustness:
    """Accuracy without an attack, under PGD of `STEPS` steps of `ε/4` for each `ε`, and under AutoAttack.

    All attacks on a batch start from the same random points. AutoAttack (Croce & Hein 2020) is the standard
    one of four attacks, and takes some hundred times as long as PGD.

    Args:
        network: maps images to logits; left in the mode it was in.
        loader: batches `(images, labels)`, normalised, the same in every pass.
        normalization: mean and standard deviation that were applied to the images.
        epsilons: largest changes of a pixel in [0, 1].
        restarts: attacks on an image, see `PGD`.
        autoattack: whether to run AutoAttack, which the extra `attacks` brings and which takes four classes.
        parts: keeps what is known; nothing is kept unless given.
    """
    parts = parts or Parts()
    attacks = {
        f"PGD-{steps} {epsilon:.4g}": PGD(steps, epsilon, epsilon / 4, restarts=restarts)
        for epsilon in epsilons
        for steps in STEPS
    }
    ensembles = {f"AutoAttack {epsilon:.4g}": epsilon for epsilon in epsilons if autoattack}

    def accuracy(name: str) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            batches = parts.follow(loader)
            if name in ensembles:
                return _autoattack_accuracy(network, batches, normalization, ensembles[name])
            # A ball without a radius holds the image alone.
            attack = attacks.get(name, PGD(1, 0.0, random_start=False))
            return attacked_accuracy(network, batches, attack, normalization)

    known = parts.measure(["clean", *attacks, *ensembles], accuracy)
    return Robustness(
        clean=known["clean"],
        steps=STEPS,
        pgd={e: tuple(known[f"PGD-{steps} {e:.4g}"] for steps in STEPS) for e in epsilons},
        autoattack={e: known[name] for name, e in ensembles.items()},
    )


def has_autoattack() -> bool:
    """Whether the extra `attacks` is installed."""
    return find_spec("pyautoattack") is not None


def _autoattack_accuracy(
    network: nn.Module, loader: Iterable[Sequence[Tensor]], normalization: Normalization, epsilon: float
) -> float:
    from pyautoattack import AutoAttack  # pyright: ignore[reportMissingImports]

    device = device_of(network)
    of_pixels = OfPixels(network, normalization).to(device)
    attack = AutoAttack(of_pixels, eps=epsilon, seed=0, device=device)
    hits = samples = 0
    with eval_mode(network):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            pixels = (images * of_pixels.deviation + of_pixels.mean).clamp(0, 1)
            with torch.no_grad():
                wrong_classes = of_pixels(pixels).shape[1] - 1
            attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, wrong_classes)
            attacked, _ = attack.run_standard_evaluation(pixels, labels, batch_size=len(labels))
            with torch.no_grad():
                hits += int((of_pixels(attacked).argmax(1) == labels).sum())
            samples += len(labels)
    return hits / max(samples, 1)
