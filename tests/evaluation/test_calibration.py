"""Divergences on known and unseen classes, and the classes that a data module leaves out."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import entropy

from opteq.data.digits import Digits
from opteq.errors import ConfigError
from opteq.evaluation.scores import detection, known_divergence, unknown_divergence
from opteq.experiments.measures import calibration


@pytest.fixture(scope="module")
def logs():
    return log_softmax(3 * np.random.default_rng(0).normal(size=(50, 4)), axis=1)


@pytest.mark.spec("R7.2")
def test_divergences_are_those_of_scipy(logs):
    labels = np.arange(50) % 4
    uniform = np.full(4, 0.25)
    expected = np.mean([entropy(np.eye(4)[k], np.exp(row)) for row, k in zip(logs, labels, strict=True)])
    assert known_divergence(logs, labels) == pytest.approx(expected, rel=1e-12)
    expected = np.mean([entropy(np.exp(row), uniform) for row in logs])
    assert unknown_divergence(logs) == pytest.approx(expected, rel=1e-12)


@pytest.mark.spec("R7.2")
def test_the_divergence_on_unseen_classes_reaches_from_zero_to_the_logarithm_of_their_number():
    with np.errstate(divide="ignore"):
        certain = np.log(np.eye(5))
    assert unknown_divergence(certain) == pytest.approx(np.log(5))
    assert unknown_divergence(np.full((3, 5), -np.log(5))) == pytest.approx(0, abs=1e-15)


@pytest.mark.spec("R7.2")
def test_detection_counts_pairs():
    known, unknown = np.array([0.9, 0.8, 0.5]), np.array([0.5, 0.85])
    pairs = [(k > u) + 0.5 * (k == u) for k in known for u in unknown]
    assert detection(known, unknown) == pytest.approx(np.mean(pairs))


def test_kept_classes_are_renumbered_and_the_others_are_unseen():
    everything = Digits(batch_size=2000)
    everything.setup("test")
    images, labels = next(iter(everything.test_dataloader()))
    data = Digits(batch_size=2000, classes=["7", "2", "5"])
    data.setup("fit")
    data.setup("test")
    assert data.class_names == ("7", "2", "5")
    assert len(data.class_names) == 3
    kept, renumbered = next(iter(data.test_dataloader()))
    original = torch.tensor([7, 2, 5])[renumbered]
    chosen = torch.isin(labels, torch.tensor([7, 2, 5]))
    assert torch.equal(original, labels[chosen])
    assert torch.equal(kept, images[chosen])
    unseen, names = next(iter(data.unseen_dataloader()))
    assert torch.equal(names, labels[~chosen])
    assert torch.equal(unseen, images[~chosen])
    _, train = next(iter(data.train_dataloader()))
    assert set(train.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("classes", "message"),
    [(["1"], "two or more"), (["1", "1"], "two or more"), (["1", "x"], "There is no class x in Digits")],
)
def test_classes_that_cannot_be_kept_are_named(classes, message):
    with pytest.raises(ConfigError, match=message):
        Digits(classes=classes).setup("test")


def test_without_left_out_classes_nothing_is_unseen():
    with pytest.raises(ConfigError, match="leaves some out"):
        Digits().unseen_dataloader()


def test_the_measure_looks_at_known_and_unseen_images():
    torch.manual_seed(0)
    data = Digits(batch_size=64, classes=["3", "0", "8"])
    data.setup("test")

    class Sure(torch.nn.Module):
        """Certain of the true class of all it has seen, without any idea of the rest."""

        def __init__(self):
            super().__init__()
            self.seen = torch.cat([x for x, _ in data.test_dataloader()])
            self.labels = torch.cat([y for _, y in data.test_dataloader()])

        def forward(self, x):
            same = (x[:, None] == self.seen).flatten(2).all(2)
            return 100.0 * same.to(x) @ torch.nn.functional.one_hot(self.labels, 3).to(x)

    scores = calibration(Sure(), data)
    assert scores["known_kl"] == pytest.approx(0, abs=1e-12)
    assert scores["unknown_kl"] == pytest.approx(0, abs=1e-12)
    assert scores["ece"] == pytest.approx(0, abs=1e-12)
    assert scores["auroc"] == 1
