"""AutoAttack (Croce & Hein 2020) does hardly more harm than PGD; needs the extra `attacks`."""

import os
from pathlib import Path

import pytest
import torch

import opteq
from opteq.data.digits import Digits
from opteq.data.images import read_image
from opteq.data.preprocess import Normalization, Preprocess
from opteq.evaluation.attacks import PGD, attacked_accuracy
from opteq.evaluation.display import OfPixels
from opteq.models.loading import ModelCard

autoattack = pytest.importorskip("pyautoattack")
CIFAR10 = os.environ.get("OPTEQ_CIFAR10")
"""A folder with the test images of CIFAR-10, `CLASS/FILE`."""
IMAGES = 30


def digits(card):
    data = Digits(batch_size=IMAGES)
    data.setup("test")
    return next(iter(data.test_dataloader()))


def cifar10(card):
    classes = [sorted(Path(CIFAR10, name).iterdir())[: IMAGES // 10] for name in card.class_names]
    images = torch.stack([read_image(path, 3, 32) for files in classes for path in files])
    labels = torch.arange(len(classes)).repeat_interleave(IMAGES // 10)
    return Preprocess(Normalization(card.mean, card.std))((images, labels))


@pytest.mark.timeout(3600)
@pytest.mark.spec("R7.4")
@pytest.mark.parametrize(
    ("name", "read", "epsilon"),
    [
        ("digits", digits, 0.075),
        ("digits", digits, 0.1),
        pytest.param(
            "cifar10-176k", cifar10, 1 / 255, marks=pytest.mark.skipif(CIFAR10 is None, reason="no CIFAR-10")
        ),
        pytest.param(
            "cifar10-176k", cifar10, 2 / 255, marks=pytest.mark.skipif(CIFAR10 is None, reason="no CIFAR-10")
        ),
    ],
)
def test_autoattack_does_hardly_more_harm(name, read, epsilon):
    card, network = ModelCard.read(name), opteq.load(name)
    normalization = Normalization(card.mean, card.std)
    images, labels = read(card)
    torch.manual_seed(0)
    attack = PGD(steps=100, epsilon=epsilon, step_size=None, restarts=5)
    ours = attacked_accuracy(network, [(images, labels)], attack, normalization)
    of_pixels = OfPixels(network, normalization)
    pixels = (images * of_pixels.deviation + of_pixels.mean).clamp(0, 1)
    ensemble = autoattack.AutoAttack(of_pixels, eps=epsilon, seed=0)
    ensemble.square.n_queries = 500  # the others, which know the gradient, find far more
    attacked, _ = ensemble.run_standard_evaluation(pixels, labels, batch_size=IMAGES)
    with torch.no_grad():
        theirs = (of_pixels(attacked).argmax(1) == labels).double().mean().item()
    # One point, or the one image that is more than that.
    assert ours <= theirs + max(0.01, 1 / IMAGES) + 1e-9
    assert 0 < ours < 0.9
