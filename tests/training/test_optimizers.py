import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, AdamW, NAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import LambdaLR

from opteq.errors import ConfigError
from opteq.training.optimizers import make_optimizer, take_options


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


def step(parameters, optimizer, scheduler):
    for p in parameters:
        p.grad = p.detach().cos()
    optimizer.step()
    scheduler.step()


def fresh(make, rate, weight_decay=0.1):
    """Parameters, always the same, and an optimizer of them."""
    torch.manual_seed(0)
    made = [group | {"lr": rate} for group in groups(weight_decay)]
    return [p for group in made for p in group["params"]], make_optimizer(make, made)


def training(make, rate, weight_decay=0.1):
    """Parameters, their optimizer, and the schedule that halves its rate in each step."""
    parameters, optimizer = fresh(make, rate, weight_decay)
    return parameters, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


def checkpoint_after_three_steps(make, rate):
    """The checkpoint of such a training, and its parameters."""
    parameters, optimizer, scheduler = training(make, rate)
    for _ in range(3):
        step(parameters, optimizer, scheduler)
    checkpoint = {"optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
    return deepcopy(checkpoint), parameters


def go_on(checkpoint, values, make, rate, weight_decay=0.1):
    """A training that goes on from parameters and a checkpoint, and whether the averages were kept."""
    parameters, optimizer, scheduler = training(make, rate, weight_decay)
    kept = take_options(checkpoint, fresh(make, rate, weight_decay)[1])
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return (parameters, optimizer, scheduler), kept


MOMENTUM = partial(SGD, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [AdamW, MOMENTUM])
class TestGoingOn:
    def test_the_new_rate_and_decay_hold_at_once_and_later(self, make):
        parts, kept = go_on(*checkpoint_after_three_steps(make, 0.5), make, rate=0.1, weight_decay=0.3)
        _, optimizer, _ = parts
        rates = [optimizer.param_groups[0]["lr"]]
        step(*parts)
        rates.append(optimizer.param_groups[1]["lr"])
        assert kept
        assert rates == pytest.approx([0.1 / 8, 0.1 / 16])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0]

    def test_with_the_same_options_it_is_the_same_training(self, make):
        whole = training(make, 0.3)
        for _ in range(5):
            step(*whole)
        parts, _ = go_on(*checkpoint_after_three_steps(make, 0.3), make, rate=0.3)
        for _ in range(2):
            step(*parts)
        assert all(torch.equal(p, q) for p, q in zip(parts[0], whole[0], strict=True))


@pytest.mark.parametrize(("before", "after"), [(MOMENTUM, AdamW), (AdamW, MOMENTUM)])
def test_another_kind_of_optimizer_starts_afresh_where_the_schedule_is(before, after):
    checkpoint, values = checkpoint_after_three_steps(before, 0.5)
    (parameters, optimizer, scheduler), kept = go_on(checkpoint, values, after, rate=0.5, weight_decay=0.0)
    bare = [p.detach().clone().requires_grad_() for p in parameters]
    alone = after(bare, lr=0.5 / 8, weight_decay=0)
    step(parameters, optimizer, scheduler)
    step(bare, alone, LambdaLR(alone, lambda step: 1.0))
    assert not kept
    assert all(torch.equal(p, q) for p, q in zip(parameters, bare, strict=True))
