import pytest
import torch
import torch.nn.functional as F

from opteq.errors import ConfigError
from opteq.models.stems import ConvStem, PooledStem, ResNetStem
from tests.networks import count


def widths(stem):
    return [m.out_channels for m in stem if isinstance(m, torch.nn.Conv2d)]


def test_widths_strides_and_padding():
    stem = ConvStem(3, 16, downsamplings=2, widths=[8, 16], padding=1)
    assert stem(torch.randn(2, 3, 30, 14)).shape == (2, 16, 8, 4)
    assert count(stem) == 9 * (3 * 8 + 8 * 16 + 16 * 16) + 2 * (8 + 16 + 16)
    # The first convolutions are the strided ones.
    assert [m.stride for m in stem if isinstance(m, torch.nn.Conv2d)] == [(2, 2), (2, 2), (1, 1)]


def test_the_width_doubles_as_the_image_halves():
    stem = ConvStem(3, 32, downsamplings=3)
    assert widths(stem) == [8, 16, 32]
    assert stem(torch.randn(1, 3, 16, 24)).shape == (1, 32, 2, 3)
    assert ConvStem(1, 32, padding=2)(torch.randn(1, 1, 8, 8)).shape == (1, 32, 12, 12)


def test_the_pooled_stem_is_a_convolution_and_a_mean():
    stem, x = PooledStem(3, 5, factor=2), torch.randn(2, 3, 8, 8)
    convolved = F.conv2d(x, stem[0].weight, stem[0].bias, padding=1)
    torch.testing.assert_close(stem(x), convolved.reshape(2, 5, 4, 2, 4, 2).mean((3, 5)))


@pytest.mark.spec("R2.7")
def test_two_stages_of_a_resnet_are_at_an_eighth_of_the_size():
    with torch.no_grad():
        assert ResNetStem(3).eval()(torch.randn(1, 3, 224, 224)).shape == (1, 512, 28, 28)
        assert ResNetStem(1, "wide_resnet50_2")(torch.randn(2, 1, 32, 32)).shape == (2, 512, 4, 4)


@pytest.mark.parametrize(("stages", "stride"), [(1, 4), (2, 8), (4, 32)])
def test_other_stages_and_networks_without_dilation(stages, stride):
    with torch.no_grad():
        features = ResNetStem(1, "resnet18", stages).eval()(torch.randn(1, 1, 64, 64))
    assert features.shape[2:] == (64 // stride, 64 // stride)


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"from 0 to 1 downsamplings, one per convolution, got .*and 2"):
        ConvStem(3, 8, downsamplings=2, widths=[])
    with pytest.raises(ConfigError, match=r"positive channels.*got \[3, 0, 8\]"):
        ConvStem(3, 8, widths=[0])
    with pytest.raises(ConfigError, match="`in_channels` to be a whole number of at least 1, got None"):
        ConvStem()
    with pytest.raises(ConfigError, match="`factor` to be a whole number of at least 1, got 0"):
        PooledStem(3, factor=0)
    with pytest.raises(ConfigError, match=r"`backbone` to be one of resnet101, .*, got 'vgg11'"):
        ResNetStem(3, "vgg11")
    with pytest.raises(ConfigError, match="from 1 to 4 `stages`, got 5"):
        ResNetStem(3, stages=5)
