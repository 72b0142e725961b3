"""Explicit rivals: torchvision's residual networks and timm's."""

import sys

import pytest
import torch
import torchvision
from torch import nn

from opteq.errors import ConfigError
from opteq.models.baselines.hrnet import TimmFeatures
from opteq.models.baselines.resnet import ResidualBlocks, ResNetStages
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.stems import ConvStem
from tests.networks import count


def small_images(backbone, channels):
    return ImageClassifier(ConvStem(3, 64), ResNetStages(64, backbone), Head(channels, 10, norm=False))


@pytest.mark.spec("R7.8")
def test_the_network_for_small_images_is_torchvisions_without_its_pooling():
    torch.manual_seed(0)
    network, expected = small_images("resnet18", 512), torchvision.models.resnet18(num_classes=10)
    expected.conv1, expected.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    # Both list their weights in the order of the forward pass.
    for mine, theirs in zip(expected.state_dict().values(), network.state_dict().values(), strict=True):
        mine.copy_(theirs)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network.eval()(x), expected.eval()(x), rtol=1e-4, atol=1e-5)
    assert network.features(x).shape == (2, 512, 4, 4)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize(
    ("backbone", "channels", "parameters"),
    # What torchvision documents for ImageNet, less 7×7×3×64 for 3×3×3×64 weights, and 10 for 1000 classes.
    [
        ("resnet18", 512, 11_689_512 - 40 * 192 - 990 * 513),
        ("resnet34", 512, 21_797_672 - 40 * 192 - 990 * 513),
        ("resnet50", 2048, 25_557_032 - 40 * 192 - 990 * 2049),
        ("resnet101", 2048, 44_549_160 - 40 * 192 - 990 * 2049),
        ("wide_resnet50_2", 2048, 68_883_240 - 40 * 192 - 990 * 2049),
    ],
)
def test_the_sizes_of_the_networks_for_small_images(backbone, channels, parameters):
    with torch.device("meta"):
        assert count(small_images(backbone, channels)) == parameters


def test_residual_blocks_keep_size_and_channels():
    body = ResidualBlocks(6, 3)
    assert body(torch.randn(2, 6, 5, 4)).shape == (2, 6, 5, 4)
    assert count(body) == 3 * (2 * 9 * 36 + 4 * 6)


@pytest.mark.spec("R7.8")
def test_hrnet_gives_the_features_that_its_classifier_reads():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    body = TimmFeatures(3, "hrnet_w18_small").eval()
    expected = timm.create_model("hrnet_w18_small", num_classes=10).eval()
    expected.load_state_dict(body.network.state_dict(), strict=False)
    network = ImageClassifier(nn.Identity(), body, Head(2048, 10, norm=False)).eval()
    network.head[-1].load_state_dict(expected.classifier.state_dict())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(network(x), expected(x), rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        sizes = [count(TimmFeatures(3, name)) + 1000 * 2049 for name in ("hrnet_w18_small", "hrnet_w18")]
    # As published: 13.2M and 21.3M.
    assert sizes == [pytest.approx(13.2e6, rel=0.01), pytest.approx(21.3e6, rel=0.01)]


def test_bad_input_and_a_missing_package_are_told(monkeypatch):
    with pytest.raises(
        ConfigError, match="stages of resnet18 read 64 channels; give the stem as many, got 32"
    ):
        ResNetStages(32)
    with pytest.raises(ConfigError, match=r"`backbone` to be one of .*resnet18.*got 'resnet19'"):
        ResNetStages(64, "resnet19")
    with pytest.raises(ConfigError, match="`depth` to be a whole number of at least 1, got 0"):
        ResidualBlocks(4, 0)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs the package timm: pip install 'opteq\[rivals\]'"):
        TimmFeatures(3)
