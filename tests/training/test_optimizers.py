import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import ASGD, LBFGS, NAdam, RMSprop, Rprop

from opteq.errors import ConfigError
from opteq.training.optimizers import make_optimizer


def groups(weight_decay=0.1):
    linear = nn.Linear(3, 2)
    return [
        {"params": [linear.weight], "lr": 0.5, "weight_decay": weight_decay},
        {"params": [linear.bias], "lr": 0.5, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("make", [NAdam, ASGD, partial(RMSprop, momentum=0.9)])
def test_every_optimizer_has_the_rate_and_the_decay_of_the_training(make):
    optimizer = make_optimizer(make, groups())
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.1), (0.5, 0)]
    assert optimizer.param_groups[0].get("momentum", 0.9) == 0.9


def test_the_decay_is_applied():
    made = groups()
    (weight,), (bias,) = (group["params"] for group in made)
    before = weight.detach().clone(), bias.detach().clone()
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    make_optimizer(torch.optim.SGD, made).step()
    torch.testing.assert_close(weight.detach(), before[0] * (1 - 0.5 * 0.1))
    torch.testing.assert_close(bias.detach(), before[1], rtol=0, atol=0)


def test_an_optimizer_of_timm_takes_its_step_with_the_rate_and_the_decay_of_the_training():
    optim = pytest.importorskip("timm.optim", reason="timm is not installed")
    made = groups()
    (weight,), (bias,) = (group["params"] for group in made)
    before = weight.detach().clone(), bias.detach().clone()
    weight.grad, bias.grad = torch.randn(2, 3), torch.randn(2)
    make_optimizer(partial(optim.Lion, betas=(0.8, 0.9)), made).step()
    # The first step of Lion (Chen et al. 2023) is the sign of the gradient.
    torch.testing.assert_close(weight.detach(), before[0] * (1 - 0.5 * 0.1) - 0.5 * weight.grad.sign())
    torch.testing.assert_close(bias.detach(), before[1] - 0.5 * bias.grad.sign())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (LBFGS, r"cannot be made \(LBFGS doesn't support per-parameter options"),
        (partial(NAdam, lr=0.1), "NAdam was given `lr` 0.1; set --model.learning_rate"),
        (partial(NAdam, weight_decay=0.2), "given `weight_decay` 0.2; set --model.weight_decay"),
        (Rprop, "Rprop has no weight decay; set --model.weight_decay 0"),
    ],
)
def test_what_would_be_ignored_is_refused(make, sentence):
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=sentence):
        make_optimizer(make, groups())
    assert make_optimizer(Rprop, groups(0.0)).param_groups[0]["lr"] == 0.5
