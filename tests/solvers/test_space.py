import math

import pytest
import torch

from opteq.solvers.space import Space, relative_change


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 4, 5), (3, 2, 4, 5), (0, 2, 4, 5)])
def test_flattening_a_tensor_and_back_is_the_identity_without_a_copy(shape):
    state = torch.randn(shape)
    space = Space(state)
    flat = space.flatten(state)
    assert flat.shape == (shape[0], math.prod(shape[1:]))
    assert flat.data_ptr() == state.data_ptr()
    back = space.restore(flat)
    assert torch.equal(back, state)
    assert back.stride() == state.stride()
    assert back.data_ptr() == state.data_ptr()


def test_channels_last_is_kept_without_a_copy():
    state = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    space = Space(state)
    flat = space.flatten(state)
    assert flat.data_ptr() == state.data_ptr()
    back = space.restore(flat)
    assert torch.equal(back, state)
    assert back.is_contiguous(memory_format=torch.channels_last)
    # A tensor that comes in the other layout lands on the same entries.
    assert torch.equal(space.flatten(state.contiguous()), flat)


def test_branches_lie_side_by_side():
    state = (torch.randn(3, 2), torch.randn(3, 2, 2, 2).contiguous(memory_format=torch.channels_last))
    space = Space(state)
    flat = space.flatten(state)
    assert flat.shape == (3, 10)
    assert torch.equal(flat[:, :2], state[0])
    back = space.restore(flat)
    assert all(torch.equal(a, b) for a, b in zip(back, state, strict=True))
    for other in (state[:1], (*state, state[0])):
        with pytest.raises(ValueError, match="zip"):
            space.flatten(other)


def branches(seed=0):
    torch.manual_seed(seed)
    return torch.randn(3, 2), torch.randn(3, 2, 2, 2).contiguous(memory_format=torch.channels_last)


def test_a_batch_that_is_one_system_is_one_row():
    first, second = state = branches()
    space = Space(state, joint=True)
    flat = space.flatten(state)
    rows = torch.cat([first, second.permute(0, 2, 3, 1).reshape(3, 8)], dim=1)
    assert torch.equal(flat, rows.reshape(1, 30))
    assert all(torch.equal(a, b) for a, b in zip(space.restore(flat), state, strict=True))
    alone = Space(first, joint=True)
    assert torch.equal(alone.flatten(first), first.reshape(1, 6))
    assert torch.equal(alone.restore(first.reshape(1, 6)), first)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("part", [None, 0, 1])
def test_a_state_is_subtracted_from_a_row(overwrite, part):
    state, other = (branches(seed) if part is None else branches(seed)[part] for seed in (0, 1))
    space = Space(state)
    flat, expected = space.flatten(other).clone(), space.flatten(other) - space.flatten(state)
    kept = flat.clone(), space.flatten(state).clone()
    difference = space.subtract(flat, state, overwrite)
    assert torch.equal(difference, expected)
    assert torch.equal(flat, kept[0])
    if overwrite and part is not None:
        assert difference.data_ptr() == state.data_ptr()
    else:
        assert torch.equal(space.flatten(state), kept[1])


def test_a_state_is_arranged_like_the_example():
    example = branches()
    other = tuple(t.contiguous() for t in branches(1))
    arranged = Space(example).arranged(other)
    assert all(torch.equal(a, b) for a, b in zip(arranged, other, strict=True))
    assert arranged[1].is_contiguous(memory_format=torch.channels_last)
    assert Space(example).arranged(example)[1].data_ptr() == example[1].data_ptr()


def test_the_relative_change_is_that_of_all_branches_together():
    old, new = branches(), branches(1)
    change = [(b - a).flatten(1).square().sum(1) for a, b in zip(old, new, strict=True)]
    size = [b.flatten(1).square().sum(1) for b in new]
    expected = (sum(change) / sum(size)).sqrt()
    torch.testing.assert_close(relative_change(old, new), expected)
    parameter = torch.ones(2, 3, requires_grad=True)
    assert not relative_change(torch.zeros(2, 3), parameter).requires_grad
    # To nothing at all, and from it.
    tiny = torch.finfo(torch.float32).tiny
    nothing, one = torch.zeros(1, 1), torch.ones(1, 1)
    assert relative_change(tiny * one, nothing).tolist() == [1.0]
    assert relative_change(nothing, one).tolist() == [1.0]
