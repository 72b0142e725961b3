"""What a step costs, by a clock that is made up and by tensors of known size."""

import time

import pytest
import torch
from torch import nn

from opteq.data.digits import Digits
from opteq.experiments.costs import step_memory, step_times


@pytest.fixture(scope="module")
def digits():
    data = Digits(batch_size=16)
    data.setup("test")
    return data


@pytest.mark.spec("R7.1")
def test_times_are_medians_without_the_first(digits, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Spend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward_seconds):
            now[0] += forward_seconds
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            now[0] += 0.005
            return gradient, None

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            slow = self.calls % 10 == 1  # the first, which warms up
            seconds = 9.0 if slow else (0.003 if self.training else 0.002)
            return Spend.apply(self.head(x.flatten(1)), seconds)

    found = step_times(Network(), digits)
    assert found == pytest.approx({"inference_ms": 2, "step_ms": 8, "backward_ms": 5})


def test_the_memory_of_a_step_is_what_it_holds_at_once(digits):
    """A thousand numbers for each of 16 images, kept for the backward pass, and the gradients."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.head = nn.Linear(64, 1000, bias=False), nn.Linear(1000, 10, bias=False)

        def forward(self, x):
            return self.head(self.wide(x.flatten(1)).sigmoid())

    kept = 16 * 1000 * 4 * 2  # before and after the sigmoid, whose input is freed once it is known
    gradients = (64 * 1000 + 1000 * 10) * 4
    found = step_memory(Wide(), digits)["step_mb"] * 1e6
    assert gradients < found < 1.5 * (gradients + kept)
