import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import Patches
from opteq.errors import ConfigError, ShapeError
from opteq.objectives.patches import WholeSample
from tests.conformance.reference import random

small = st.integers(1, 3)


@given(small, small, small, small, small, small, st.booleans())
@settings(max_examples=40)
@pytest.mark.spec("R6.2")
def test_patches_by_hand(batch, channels, size, groups, rows, columns, channels_last):
    patches = Patches(channels, size)
    x = random(batch, groups * channels, rows * size, columns * size)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    split = patches.split(x)
    assert split.shape == (batch, groups * rows * columns, patches.dimension)
    index = 0
    for i in range(rows):
        for j in range(columns):
            for g in range(groups):
                block = x[
                    :,
                    g * channels : (g + 1) * channels,
                    i * size : (i + 1) * size,
                    j * size : (j + 1) * size,
                ]
                # Within a patch: row, column, channel.
                assert torch.equal(split[:, index], block.permute(0, 2, 3, 1).flatten(1))
                index += 1


@pytest.mark.parametrize("patches", [Patches(2, 2), Patches(1, 1), Patches(4, 2), WholeSample()], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.spec("R6.2")
def test_merge_is_inverse_and_adjoint(patches, channels_last):
    x = random(3, 4, 6, 2)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    split = patches.split(x)
    assert torch.equal(patches.merge(split, x), x)
    q = random(*split.shape, seed=1)
    assert torch.equal(patches.split(patches.merge(q, x)), q)
    torch.testing.assert_close((split * q).sum(), (x * patches.merge(q, x)).sum(), rtol=1e-13, atol=1e-12)


def test_whole_samples_of_any_shape():
    x = random(3, 5)
    assert WholeSample().split(x).shape == (3, 1, 5)
    assert torch.equal(WholeSample().merge(WholeSample().split(x), x), x)


@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (2, 4, 3, 4), (2, 4, 4, 5), (2, 4)])
@pytest.mark.spec("R6.2")
def test_sizes_that_do_not_divide_are_refused(shape):
    with pytest.raises(ShapeError, match="change the patches, the hidden channels or the image size"):
        Patches(2, 2).check(shape)


@pytest.mark.parametrize(("options", "name"), [({"channels": 0}, "channels"), ({"size": 0}, "size")])
def test_options_out_of_range_are_refused(options, name):
    with pytest.raises(ConfigError, match=f"Expected `{name}` of Patches to be at least 1, got 0"):
        Patches(**options)


def test_unknown_options_list_the_valid_ones():
    with pytest.raises(ConfigError, match="no option 'stride'; it has channels, size"):
        Patches(stride=2)  # type: ignore[call-arg]
