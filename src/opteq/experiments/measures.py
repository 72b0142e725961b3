"""Scores of a trained network beyond those of `opteq test`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from opteq.data.base import ImageDataModule, Loader
from opteq.data.cifar import CIFAR10, CIFAR100
from opteq.data.connected import ConnectedPixels
from opteq.errors import ConfigError
from opteq.evaluation.branchstudy import RELATED_SAMPLES, has_branches, relations
from opteq.evaluation.corruptions import corrupted_accuracy
from opteq.evaluation.scores import detection, known_divergence, reliability, unknown_divergence
from opteq.evaluation.trace import first_call
from opteq.solvers.space import relative_change
from opteq.training.taskscores import make_scores

REPEATS = 9
LARGER = (32, 48)


def step_times(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """Medians over repetitions on one test batch, in milliseconds, after a first that does not count.

    `inference_ms` is a forward pass in eval mode without gradients, `step_ms` a forward and a backward
    pass in training mode, and `backward_ms` the backward pass alone.
    """
    images, labels = next(iter(data.test_dataloader()))
    network.eval()
    with torch.no_grad():
        inference = _median_ms(lambda: network(images))
    network.train()
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        loss = cross_entropy(network(images), labels)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        times.append((end - start, end - middle))
    step, backward = (1000 * median(column) for column in zip(*times[1:], strict=True))
    return {"inference_ms": inference, "step_ms": step, "backward_ms": backward}


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
    """`mAcc_32` and `mAcc_48`: the mean accuracy of the classes on mazes of these sizes, 100 of each."""
    if not isinstance(data, ConnectedPixels):
        raise ConfigError(f"Expected ConnectedPixels, whose images may be of any size, got {data.title}.")
    network.eval()
    scores = {}
    for size in LARGER:
        larger = ConnectedPixels(data.size, size, 1, 100, data.open_share)
        larger.setup("test")
        score = make_scores("segmentation", len(data.class_names))["mAcc"]
        for images, labels in larger.test_dataloader():
            score.update(network(images), labels)
        scores[f"mAcc_{size}"] = float(score.compute())
    return scores


def feature_norms(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`mean_l1` and `mean_square`: mean of `|z|` and of `z²` over the features of the test images."""
    absolute, square, count = 0.0, 0.0, 0
    network.eval()
    with torch.no_grad():
        for images, _ in data.test_dataloader():
            features: Tensor = network.features(images)  # type: ignore[operator]
            absolute += float(features.abs().sum())
            square += float(features.square().sum())
            count += features.numel()
    return {"mean_l1": absolute / count, "mean_square": square / count}


def calibration(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """How sure the network is of classes it knows and of those that `data.classes` left out of training.

    `known_kl` and `unknown_kl` are the divergences of `opteq.evaluation.scores` (lower is better), `ece` the
    expected calibration error on known classes, `auroc` how well confidence tells known from unseen.
    """
    known, labels = _log_probabilities(network, data.test_dataloader())
    unknown, _ = _log_probabilities(network, data.unseen_dataloader())
    confidence = np.exp(known.max(1))
    return {
        "known_kl": known_divergence(known, labels),
        "unknown_kl": unknown_divergence(unknown),
        "ece": reliability(confidence, known.argmax(1) == labels).error,
        "auroc": detection(confidence, np.exp(unknown.max(1))),
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
        predictions, labels = _log_probabilities(network, loader)
        scores[f"{name}_accuracy"] = float((predictions.argmax(1) == labels).mean())
    return scores


def corruptions(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`corrupted_accuracy`, the mean over `CORRUPTIONS` and severities, and a mean for each corruption.

    The arrays are those of `CIFAR-10-C` or `CIFAR-100-C` in the folder of the data set.
    """
    if not isinstance(data, CIFAR10):
        raise ConfigError(
            f"Expected CIFAR-10 or CIFAR-100, got {data.title}; there are corruptions of those."
        )
    folder = Path(data.root) / f"CIFAR-{100 if isinstance(data, CIFAR100) else 10}-C"
    means = {n: float(np.mean(a)) for n, a in corrupted_accuracy(network, folder, data.normalization).items()}
    return {"corrupted_accuracy": float(np.mean(list(means.values()))), **means}


@torch.no_grad()
def _log_probabilities(network: nn.Module, loader: Loader) -> tuple[NDArray, NDArray]:
    network.eval()
    batches = [(network(images).double().log_softmax(1), labels) for images, labels in loader]
    predictions, labels = zip(*batches, strict=True)
    return torch.cat(predictions).numpy(), torch.cat(labels).numpy()


def branch_relations(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`heritage`, `diversity` and `diagonal_share`: means over 100 test images, see `BranchRecord`."""
    images: list[Tensor] = []
    for batch, _ in data.test_dataloader():
        images.append(batch)
        if sum(map(len, images)) >= RELATED_SAMPLES:
            break
    network.eval()
    if not has_branches(network, images[0]):
        raise ConfigError(f"Expected a network with a body of several branches, got {network}.")
    heritage, diversity, share, _ = relations(network, torch.cat(images)[:RELATED_SAMPLES])
    return {
        "heritage": float(heritage.mean()),
        "diversity": float(diversity.mean()),
        "diagonal_share": float(share.mean()),
    }


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * median(times[1:])
