"""The convolutional stem."""

import pytest
import torch

from opteq.errors import ConfigError
from opteq.models.stem import convolutional_stem, doubling_stem


def test_widths_strides_and_padding():
    stem = convolutional_stem(3, [8, 16, 16], downsamplings=2, padding=1)
    assert stem(torch.randn(2, 3, 30, 14)).shape == (2, 16, 8, 4)
    assert sum(p.numel() for p in stem.parameters()) == 9 * (3 * 8 + 8 * 16 + 16 * 16) + 2 * (8 + 16 + 16)
    # The first convolutions are the strided ones.
    assert [m.stride for m in stem if isinstance(m, torch.nn.Conv2d)] == [(2, 2), (2, 2), (1, 1)]


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"positive widths, got \[\]"):
        convolutional_stem(3, [])
    with pytest.raises(ConfigError, match=r"from 0 to 1 downsamplings.*got 2 and 0"):
        convolutional_stem(3, [8], downsamplings=2)


def test_the_width_doubles_as_the_image_halves():
    stem = doubling_stem(3, 32, downsamplings=3)
    assert [m.out_channels for m in stem if isinstance(m, torch.nn.Conv2d)] == [8, 16, 32]
    assert stem(torch.randn(1, 3, 16, 24)).shape == (1, 32, 2, 3)
    assert doubling_stem(1, 32, downsamplings=0, padding=2)(torch.randn(1, 1, 8, 8)).shape == (1, 32, 12, 12)
