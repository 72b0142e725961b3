import math

import pytest
import torch

from opteq.solvers.space import Space


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
