import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from torchmetrics.classification import BinaryAUROC, MulticlassCalibrationError

from opteq.evaluation.ood import fit_temperature, ood_scores


@pytest.fixture
def answers():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 300)
    known = 2.5 * (rng.normal(size=(300, 6)) + 1.5 * np.eye(6)[labels])
    return known, labels, 2.5 * rng.normal(size=(200, 6))


def softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.spec("R7.2")
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_scores_agree_with_other_implementations(answers, temperature):
    known, labels, unknown = answers
    scores = ood_scores(known, labels, unknown, temperature)
    p, q = softmax(known / temperature), softmax(unknown / temperature)
    assert scores.known_kl == pytest.approx(np.mean(entropy(np.eye(6)[labels], p, axis=1)), rel=1e-9)
    assert scores.unknown_kl == pytest.approx(np.mean(entropy(q, np.full((200, 6), 1 / 6), axis=1)), rel=1e-9)
    calibration = MulticlassCalibrationError(6, n_bins=15, norm="l1")
    expected = float(calibration(torch.tensor(p), torch.tensor(labels)))
    assert scores.ece == pytest.approx(expected, abs=1e-6)
    confidence = torch.tensor(np.concatenate([p.max(1), q.max(1)]))
    is_known = torch.tensor([1] * 300 + [0] * 200)
    assert scores.auroc == pytest.approx(float(BinaryAUROC()(confidence, is_known)), abs=1e-6)
    assert scores.accuracy == (p.argmax(1) == labels).mean()
    assert 0.5 < scores.accuracy < 1
    assert 0.5 < scores.auroc < 1


@pytest.mark.spec("R7.2")
def test_the_temperature_has_the_least_cross_entropy(answers):
    known, labels, _ = answers
    log_temperature = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_temperature], max_iter=100, tolerance_grad=1e-12, tolerance_change=1e-14
    )

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.tensor(known) / log_temperature.exp(), torch.tensor(labels))
        loss.backward()
        return loss

    optimizer.step(closure)
    fitted = fit_temperature(known, labels)
    assert fitted == pytest.approx(log_temperature.exp().item(), rel=1e-4)
    assert fitted > 1.2
    assert fit_temperature(known * 3, labels) == pytest.approx(3 * fitted, rel=1e-4)


def test_logits_that_are_always_right_have_the_smallest_temperature():
    assert fit_temperature(np.eye(4), np.arange(4)) == pytest.approx(1 / 20, rel=1e-3)
