import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

from opteq.errors import ConfigError
from opteq.training.schedules import learning_rate_factor


def rates(make_scheduler, steps):
    """Learning rates that a scheduler sets over a training."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make_scheduler(optimizer)
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_cosine_agrees_with_torch():
    ours = rates(lambda optimizer: LambdaLR(optimizer, learning_rate_factor("cosine", 20)), 20)
    assert ours == pytest.approx(rates(lambda optimizer: CosineAnnealingLR(optimizer, 20), 20))


def test_linear_with_warmup_falls_like_torchs_one_cycle():
    def one_cycle(optimizer):
        # torch's cycle ends with the last step, ours after it.
        form = {"pct_start": 0.3, "anneal_strategy": "linear", "final_div_factor": 1e9}
        return OneCycleLR(optimizer, 1.0, 101, cycle_momentum=False, **form)

    ours = rates(lambda optimizer: LambdaLR(optimizer, learning_rate_factor("linear", 100, 0.3)), 100)
    assert ours[30:] == pytest.approx(rates(one_cycle, 100)[30:], abs=0.02)
    assert max(ours) == ours[30] == 1


def test_step_drops_at_half_and_three_quarters():
    factor = learning_rate_factor("step", 100)
    assert [factor(step) for step in (0, 49, 50, 74, 75, 99)] == [1, 1, 0.1, 0.1, 0.01, 0.01]


@pytest.mark.spec("R2.8")
def test_poly_agrees_with_torch():
    ours = rates(lambda optimizer: LambdaLR(optimizer, learning_rate_factor("poly", 20)), 20)
    assert ours == pytest.approx(rates(lambda optimizer: PolynomialLR(optimizer, 20, power=0.9), 20))


def test_step_drops_at_its_milestones():
    def milestones(optimizer):
        return MultiStepLR(optimizer, [100, 150, 175], gamma=0.1)

    factor = learning_rate_factor("step", 200, milestones=[0.5, 0.75, 0.875])
    ours = rates(lambda optimizer: LambdaLR(optimizer, factor), 200)
    assert ours == pytest.approx(rates(milestones, 200))


@pytest.mark.parametrize(("every", "drop"), [(20, 0.7), (30, 0.5)])
def test_steps_of_the_tables_of_opteq(every, drop):
    """Of 200 epochs, ×0.7 every 20 (Xie et al. 2022, Table 5) and halved every 30 (Table 3)."""
    milestones = [epoch / 200 for epoch in range(every, 200, every)]
    factor = learning_rate_factor("step", 200, milestones=milestones, drop=drop)
    ours = rates(lambda optimizer: LambdaLR(optimizer, factor), 200)
    assert ours == pytest.approx(rates(lambda optimizer: StepLR(optimizer, every, gamma=drop), 200))


@pytest.mark.parametrize("drop", [0.0, 1.0, float("nan")])
def test_refuses_what_does_not_drop(drop):
    with pytest.raises(ConfigError, match="`drop` between 0 and 1"):
        learning_rate_factor("step", 10, drop=drop)


@pytest.mark.parametrize("milestones", [[0.5, 0.5], [0.7, 0.6], [0.0], [1.0], [float("nan")]])
def test_refuses_milestones_that_do_not_rise_from_0_to_1(milestones):
    with pytest.raises(ConfigError, match="rising `milestones`"):
        learning_rate_factor("step", 10, milestones=milestones)


def test_refuses_milestones_of_another_schedule():
    with pytest.raises(ConfigError, match="those of the schedule 'step', but it is 'cosine'"):
        learning_rate_factor("cosine", 10, milestones=[0.5])


def test_constant():
    assert {learning_rate_factor("constant", 10)(step) for step in range(12)} == {1.0}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "linear", "poly"])
def test_warmup_rises_to_the_peak_and_factors_stay_between_0_and_1(schedule):
    factor = learning_rate_factor(schedule, 100, 0.1)
    values = [factor(step) for step in range(101)]
    assert values[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert min(values) >= 0
    assert max(values) == 1


@pytest.mark.parametrize("warmup", [-0.1, 1.0, float("nan")])
def test_refuses_a_warmup_out_of_range(warmup):
    with pytest.raises(ConfigError, match="warmup"):
        learning_rate_factor("cosine", 10, warmup)


@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_a_training_of_no_steps_has_a_schedule(warmup):
    assert learning_rate_factor("linear", 0, warmup)(0) == 1
