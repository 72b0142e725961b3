"""Scores of a trained network beyond those of `opteq test`."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor, nn

from opteq.data.base import ImageDataModule
from opteq.data.connected import ConnectedPixels
from opteq.errors import ConfigError
from opteq.evaluation.attacks import PGD, attacked_accuracy
from opteq.evaluation.branchstudy import (
    DIRECTIONS,
    RELATED_SAMPLES,
    STUDIED_SAMPLES,
    has_branches,
    relations,
    study_branches,
)
from opteq.evaluation.corruptions import corrupted_accuracy
from opteq.evaluation.equilibriumstudy import study_equilibrium
from opteq.evaluation.ood import fit_temperature, ood_scores
from opteq.evaluation.passes import Spread, logits_of, share_of
from opteq.evaluation.scores import known_divergence
from opteq.evaluation.trace import first_call
from opteq.solvers.space import relative_change
from opteq.system.progress import follow
from opteq.training.taskscores import make_scores

ATTACKED_IMAGES = 500
CORRUPTED_IMAGES = 500
STUDIED_IMAGES = 1000
LARGER = (32, 48)


def relative_residual(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`residual`: mean of `‖T(z) - z‖ / ‖T(z)‖` at the state of the first equilibrium layer, on a test batch.

    It is found by evaluating the map once more, whatever the layer reports of itself. A network without
    such a layer has none.
    """
    images, _ = next(iter(data.test_dataloader()))
    with torch.no_grad():
        call = first_call(network.eval(), images)
        if call is None:
            return {}
        layer, x = call
        state = layer.solve(x).state
        return {"residual": float(relative_change(state, layer.bind(x)(state)).mean())}


@torch.no_grad()
def larger_mazes(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`mAcc_32` and `mAcc_48`: the mean accuracy of the classes on mazes of these sizes, at most 100 each."""
    if not isinstance(data, ConnectedPixels):
        raise ConfigError(f"Expected ConnectedPixels, whose images may be of any size, got {data.title}.")
    network.eval()
    scores = {}
    for size in LARGER:
        larger = ConnectedPixels(data.size, size, 1, min(100, data.test_images), data.open_share)
        larger.setup("test")
        score = make_scores("segmentation", len(data.class_names))["mAcc"]
        for images, labels in follow(larger.test_dataloader(), f"Mazes of {size} pixels"):
            score.update(network(images), labels)
        scores[f"mAcc_{size}"] = float(score.compute())
    return scores


def feature_norms(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`mean_l1` and `mean_square`: mean of `|z|` and of `z²` over the features of the test images."""
    absolute, square, count = 0.0, 0.0, 0
    network.eval()
    with torch.no_grad():
        for images, _ in follow(data.test_dataloader(), "Norms of features"):
            features: Tensor = network.features(images)  # type: ignore[operator]
            absolute += float(features.abs().sum())
            square += float(features.square().sum())
            count += features.numel()
    return {"mean_l1": absolute / count, "mean_square": square / count}


def top_five(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`test_accuracy_top5`: how often the class is among the five likeliest."""
    logits, labels = logits_of(network, follow(data.test_dataloader(), "Test images"))
    likeliest = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    return {"test_accuracy_top5": float((likeliest == labels[:, None]).any(1).mean())}


def training_loss(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`train_loss`: mean cross entropy on the training images, without augmentation, in eval mode."""
    data.setup("fit")
    data.augmentation = "none"
    logits, labels = logits_of(network, follow(data.train_dataloader(), "Training images"))
    return {"train_loss": known_divergence(log_softmax(logits, axis=1), labels)}


def attacked(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`pgd_3`, `pgd_5`, `pgd_10`, `pgd_20`: accuracy on 500 images after so many PGD steps, `ε = 8/255`."""
    images = list(_some(data, ATTACKED_IMAGES))

    def accuracy(steps: int) -> float:
        batches = follow(images, f"Attacks of {steps} steps")
        return attacked_accuracy(network, batches, PGD(steps=steps), data.normalization)

    return {f"pgd_{steps}": accuracy(steps) for steps in (3, 5, 10, 20)}


def perturbed(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """Accuracy on 256 images with perturbed features, such as `reconstructed_0.1`, see `BranchRecord`."""
    images, labels = map(torch.cat, zip(*_some(data, STUDIED_SAMPLES), strict=True))
    record = study_branches(network.eval(), images, labels)
    # What is reconstructed has nothing random: there is one trial of it.
    means = [record.accuracy[0, 0], *record.accuracy[1:].mean(1)]
    return {
        f"{direction}_{size:g}": float(value)
        for direction, row in zip(DIRECTIONS, means, strict=True)
        for size, value in zip(record.sizes, row, strict=True)
    }


def inside(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """What `study_equilibrium` sees with up to 1,000 test images, of all layers together.

    `accuracy_1`, `accuracy_3`, `accuracy_5`, `accuracy_10` and `accuracy_20` are those after so many plain
    iterations, `residual_20` the median residual of the last, `largest_norm` the largest `‖W‖`. With skip
    connections `smallest_alpha` and `largest_alpha` are those of their `α`. With Gaussian kernels `beta_max`,
    `mu` and `m` are the largest of the quantities of Remark 1 of Li et al. 2023, `remark_1` whether what it
    asks for holds, and `lipschitz_geq` and `lipschitz_opteq` those of Proposition 3. A network without
    equilibria has none of all this.
    """
    share = share_of(data.test_dataloader(), STUDIED_IMAGES)
    try:
        record = study_equilibrium(network, follow(data.test_dataloader(), "Equilibria"), share=share)
    except ConfigError:
        return {}
    after = dict(zip(record.steps, record.accuracy, strict=True))
    scores = {f"accuracy_{steps}": after[steps] for steps in (1, 3, 5, 10, 20)}
    scores["residual_20"] = float(max(layer.residual[1, -1] for layer in record.layers))
    scores["largest_norm"] = max(s.largest for layer in record.layers for s in layer.spectra)
    if alphas := [alpha for layer in record.layers for alpha in layer.alpha]:
        scores |= {"smallest_alpha": min(alphas), "largest_alpha": max(alphas)}
    if kernels := [kernel for layer in record.layers for kernel in layer.kernels]:
        geq, opteq = zip(*(kernel.lipschitz for kernel in kernels), strict=True)
        scores |= {
            "beta_max": max(kernel.largest_weight for kernel in kernels),
            "mu": float(np.max([kernel.norm for kernel in kernels])),
            "m": max(kernel.W_norm**2 for kernel in kernels),
            "remark_1": float(all(kernel.remark1 for kernel in kernels)),
            "lipschitz_geq": float(np.max(geq)),
            "lipschitz_opteq": float(np.max(opteq)),
        }
    return scores


def calibration(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """How sure the network is of classes it knows and of those that `data.classes` left out of training.

    `known_kl`, `unknown_kl`, `ece` and `auroc` are those of `OodScores`, as the network answers, and with
    `_scaled` behind their names for logits divided by the temperature that fits the validation images.
    """
    known, labels = logits_of(network, follow(data.test_dataloader(), "Test images"))
    unknown, _ = logits_of(network, follow(data.unseen_dataloader(), "Unseen classes"))
    data.setup("validate")
    temperature = fit_temperature(*logits_of(network, follow(data.val_dataloader(), "Validation images")))
    return {
        f"{name}{ending}": getattr(ood_scores(known, labels, unknown, by), name)
        for ending, by in (("", 1.0), ("_scaled", temperature))
        for name in ("known_kl", "unknown_kl", "ece", "auroc")
    }


def subclasses(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`known_accuracy` and `unseen_accuracy`: on test images of sub-classes that training saw, and did not.

    `data.superclasses` must be set, and `data.classes` leave sub-classes out (Li et al. 2023, Table 3).
    """
    if not data.superclasses:
        raise ConfigError(
            "Expected `superclasses: true` and some of the sub-classes in `classes` of the data."
        )
    scores = {}
    for name, loader in (("known", data.test_dataloader()), ("unseen", data.unseen_dataloader())):
        predictions, labels = logits_of(network, follow(loader, f"Sub-classes, {name}"))
        scores[f"{name}_accuracy"] = float((predictions.argmax(1) == labels).mean())
    return scores


def corruptions(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`corrupted_accuracy`, on 500 images, over `CORRUPTIONS` and severities, and one for each corruption."""
    found = corrupted_accuracy(network, data.test_dataloader(), data.normalization, CORRUPTED_IMAGES)
    means = {name: float(np.mean(accuracies)) for name, accuracies in found.items()}
    return {"corrupted_accuracy": float(np.mean(list(means.values()))), **means}


def branch_relations(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`heritage`, `diversity` and `diagonal_share`: means over 100 test images, see `BranchRecord`."""
    images, _ = map(torch.cat, zip(*_some(data, RELATED_SAMPLES), strict=True))
    network.eval()
    if not has_branches(network, images):
        raise ConfigError(f"Expected a network with a body of several branches, got {network}.")
    heritage, diversity, share, _ = relations(network, images)
    return {
        "heritage": float(heritage.mean()),
        "diversity": float(diversity.mean()),
        "diagonal_share": float(share.mean()),
    }


def _some(data: ImageDataModule, images: int) -> Spread:
    """Batches with so many of the test images, which may be sorted by class, or all there are."""
    loader = data.test_dataloader()
    return Spread(loader, share_of(loader, images))
