"""The estimate of the norm where power iteration is easily deceived."""

import torch

from opteq import Conv2d, Dense


def test_a_direction_that_takes_over_is_seen():
    operator = Dense(6, 6).train()
    with torch.no_grad():
        operator.weight.copy_(torch.diag(torch.tensor([2.0, 1, 1, 1, 1, 1])))
    for value in torch.linspace(1, 4, 200):
        with torch.no_grad():
            operator.weight[1, 1] = value
        operator.norm((6,))
    assert operator.norm((6,)) > 3.99
    assert operator.eval().norm((6,)) > 3.9999


def test_a_channel_of_a_depthwise_convolution_that_takes_over_is_seen():
    # Channels do not mix, so after many steps none of another channel is left in the iterate.
    operator = Conv2d(2, 2, 3, groups=2).train()
    for step in range(600):
        with torch.no_grad():
            operator.weight.zero_()
            operator.weight[0, 0, 1, 1] = 2 + 1e-4 * step
            operator.weight[1, 0, 1, 1] = 0.5 if step < 550 else 5.0
        operator.norm((2, 4, 4))
    assert operator.norm((2, 4, 4)) > 4.99


def test_the_old_direction_may_vanish_altogether():
    operator = Dense(3, 3).eval()
    with torch.no_grad():
        operator.weight.copy_(torch.diag(torch.tensor([2.0, 0, 0])))
        operator.norm((3,))
        operator.weight.copy_(torch.diag(torch.tensor([0.0, 3, 0])))
    torch.testing.assert_close(operator.norm((3,)), torch.tensor(3.0))


def test_a_zero_operator_has_norm_zero_and_a_zero_gradient():
    operator = Dense(3, 4)
    torch.nn.init.zeros_(operator.weight)
    norm = operator.norm((3,))
    norm.backward()
    assert norm == 0
    assert torch.equal(operator.weight.grad, torch.zeros(4, 3))
    with torch.no_grad():
        operator.weight[2, 1] = 1.5
    torch.testing.assert_close(operator.norm((3,)).detach(), torch.tensor(1.5))


def test_each_image_size_has_its_own_norm():
    operator = Conv2d(1, 1, 3).double().eval()
    torch.nn.init.ones_(operator.weight)
    # On one pixel only the centre of the kernel counts; on a large image the norm nears its sum.
    torch.testing.assert_close(operator.norm((1, 1, 1)).item(), 1.0)
    assert 8.9 < operator.norm((1, 40, 40)).item() < 9
    torch.testing.assert_close(operator.norm((1, 1, 1)).item(), 1.0)


def test_data_parallel_processes_start_alike():
    torch.manual_seed(0)
    first = Dense(20, 20)
    second = Dense(20, 20)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first.norm((20,)), second.norm((20,)))
    assert torch.equal(state, torch.get_rng_state())  # nor do they touch the global generator


def test_what_inference_mode_computed_serves_a_backward_pass():
    operator = Conv2d(3, 4, 3)
    with torch.inference_mode():
        norm, bound = operator.norm((3, 5, 5)), operator.bind((3, 5, 5)).norm_bound()
    assert not bound.is_inference()
    again = operator.norm((3, 5, 5))
    assert torch.equal(again, norm)
    (gradient,) = torch.autograd.grad(again * operator.bind((3, 5, 5)).norm_bound().float(), operator.weight)
    assert gradient.norm() > 0
