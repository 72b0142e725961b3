import sys

import numpy as np
import pytest
import torch
from torch import nn

from opteq.evaluation.parts import Parts
from opteq.evaluation.robustness import STEPS, attack_accuracies, has_autoattack

MEAN, DEVIATION = 0.5, 0.25


class Linear(nn.Module):
    """Logits 0 and `⟨w, pixels⟩ + b` of pixels in [0, 1]."""

    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = w, b

    def forward(self, x):
        score = ((x * DEVIATION + MEAN).flatten(1) @ self.w) + self.b
        return torch.stack([torch.zeros_like(score), score], 1)


@pytest.fixture
def linear():
    """A linear network, and images whose pixels no attack brings to the ends of their range."""
    torch.manual_seed(0)
    w = torch.randn(16)
    pixels = 0.2 + 0.6 * torch.rand(200, 1, 4, 4)
    scores = pixels.flatten(1) @ w
    b = -scores.median()
    labels = (scores + b > 0).long()
    batches = [((x - MEAN) / DEVIATION, y) for x, y in zip(pixels.split(64), labels.split(64), strict=True)]
    return Linear(w, b), batches, (scores + b).abs(), w


@pytest.mark.spec("R7.4")
def test_against_a_linear_network_pgd_does_the_most_that_is_possible(linear):
    network, batches, margins, w = linear
    epsilons = [0.02, 0.1]
    found = attack_accuracies(network, batches, ((MEAN,), (DEVIATION,)), epsilons)
    assert found.clean == 1.0
    assert found.steps == STEPS
    for epsilon in epsilons:
        # The worst image in the ball has a score that is ε‖w‖₁ nearer to the other class: steps of ε/4 reach
        # it from anywhere in the ball after 8.
        left = float((margins > epsilon * w.abs().sum()).float().mean())
        accuracies = dict(zip(found.steps, found.pgd[epsilon], strict=True))
        assert accuracies[10] == accuracies[20] == pytest.approx(left, abs=1e-6)
        # From the same start more steps along a constant gradient never do less harm.
        assert list(found.pgd[epsilon]) == sorted(found.pgd[epsilon], reverse=True)
        assert accuracies[1] > left
    assert found.autoattack == {}


@pytest.mark.spec("R7.4")
def test_attacks_start_from_the_same_points_and_leave_random_numbers_alone(linear):
    network, batches, _, _ = linear
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = attack_accuracies(network, batches, ((MEAN,), (DEVIATION,)), [0.05])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert attack_accuracies(network, batches, ((MEAN,), (DEVIATION,)), [0.05]) == first


def test_attacks_that_are_known_are_not_run_again(linear, tmp_path):
    network, batches, _, _ = linear
    normalization = ((MEAN,), (DEVIATION,))
    found = attack_accuracies(network, batches, normalization, [0.05], parts=Parts(tmp_path / "a.json"))
    again = attack_accuracies(None, batches, normalization, [0.05], parts=Parts(tmp_path / "a.json"))
    assert again == found


@pytest.mark.skipif(not has_autoattack(), reason="the extra attacks is not installed")
@pytest.mark.spec("R7.4")
def test_autoattack_does_the_same_to_a_linear_network():
    torch.manual_seed(0)
    w = torch.randn(5, 16)

    class Five(nn.Module):
        def forward(self, x):
            return (x * DEVIATION + MEAN).flatten(1) @ w.T

    pixels = 0.2 + 0.6 * torch.rand(40, 1, 4, 4)
    logits = pixels.flatten(1) @ w.T
    labels = logits.argmax(1)
    epsilon = 0.03
    # Against class j the score changes by ε‖w_j - w_y‖₁ at most.
    reach = epsilon * (w[None] - w[labels][:, None]).abs().sum(2)
    gap = logits.gather(1, labels[:, None]) - logits
    safe = (gap > reach) | (torch.arange(5) == labels[:, None])
    batches = [((pixels - MEAN) / DEVIATION, labels)]
    found = attack_accuracies(Five(), batches, ((MEAN,), (DEVIATION,)), [epsilon], autoattack=True)
    assert found.autoattack[epsilon] == pytest.approx(float(safe.all(1).float().mean()), abs=1e-6)
    assert 0 < found.autoattack[epsilon] < 1
    assert found.autoattack[epsilon] <= np.min(found.pgd[epsilon])
    assert "pyautoattack" in sys.modules
