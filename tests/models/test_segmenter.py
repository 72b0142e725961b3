"""Segmenters: shapes, the published sizes, torchvision's FCN, and that they learn."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.segmentation import fcn_resnet50

from opteq import Unrolled, solve_log
from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.fcn import FCNSegmenter
from opteq.models.segmenter import DeepOptEqSegmenter

SMALL = {"classes": 3, "channels": 8, "hidden": (4, 8, 8), "downsamplings": 1}
LEARNING = {**SMALL, "channels": 12, "hidden": (6, 12, 12)}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.spec("R2.8")
def test_the_backbone_has_three_weighted_layers_of_the_published_channels():
    with torch.device("meta"):
        network = DeepOptEqSegmenter()
    units = network.equilibria.map.units
    assert [unit.W.out_channels for unit in units] == [256, 512, 512]
    kernels = sum(2 * 512 * n * 9 + n for n in (256, 512, 512))
    assert count(network.equilibria) == kernels
    widths = (3, 128, 256, 512)
    stem = sum(9 * a * b + 2 * b for a, b in pairwise(widths))
    head = 9 * 512 * 128 + 2 * 128 + 128 * 19 + 19
    assert count(network) == kernels + stem + head == 13_870_099


@pytest.mark.spec("R2.8")
@pytest.mark.parametrize("size", [(16, 24), (15, 17)])
def test_there_is_a_logit_for_every_class_and_pixel(size):
    torch.manual_seed(0)
    network = DeepOptEqSegmenter(**SMALL).eval()
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        z = network.features(x)
        assert z.shape == (2, 8, -(-size[0] // 2), -(-size[1] // 2))
        expected = F.interpolate(network.head(z), size, mode="bilinear")
        torch.testing.assert_close(network(x), expected)
        assert network(x).shape == (2, 3, *size)
        alone = torch.cat([network(image[None]) for image in x])
    torch.testing.assert_close(alone, network(x), rtol=0, atol=1e-2)


@pytest.mark.spec("R2.8")
@pytest.mark.parametrize(
    "network",
    [
        lambda: DeepOptEqSegmenter(**LEARNING),
        lambda: DeepOptEqSegmenter(**LEARNING, gradient=Unrolled(4), learn_alpha=True),
        lambda: FCNSegmenter(classes=3, backbone="resnet18", stages=1),
    ],
    ids=["implicit", "unrolled", "fcn"],
)
def test_segmenters_learn_to_tell_colours_apart(network):
    torch.manual_seed(0)
    network = network()
    labels = torch.randint(0, 3, (4, 4, 4)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x = F.one_hot(labels, 3).movedim(-1, 1).float() + 0.1 * torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.Adam(network.parameters(), 2e-2)
    with solve_log(network) as log:
        for _ in range(40):
            optimizer.zero_grad()
            F.cross_entropy(network(x), labels).backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
            optimizer.step()
    assert log.forward.unconverged == log.adjoint.unconverged == 0
    assert (network(x).argmax(1) == labels).double().mean() > 0.8


@pytest.mark.spec("R2.8", "R7.8")
def test_the_baseline_is_torchvisions_fcn():
    torch.manual_seed(0)
    theirs = fcn_resnet50(weights=None, weights_backbone=None, num_classes=5).eval()
    ours = FCNSegmenter(classes=5).eval()
    names = list(ours.state_dict())
    assert len(names) == len(theirs.state_dict())
    ours.load_state_dict(dict(zip(names, theirs.state_dict().values(), strict=True)))
    x = torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x)["out"])


@pytest.mark.parametrize(("stages", "stride"), [(1, 4), (2, 8), (4, 32)])
def test_fewer_stages_and_networks_without_dilation(stages, stride):
    network = FCNSegmenter(in_channels=1, classes=2, backbone="resnet18", stages=stages).eval()
    x = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        assert network.backbone(x).shape[2:] == (64 // stride, 64 // stride)
        assert network(x).shape == (1, 2, 64, 64)


def test_bad_options_and_images_are_refused():
    with pytest.raises(ConfigError, match="at least 4 `channels`"):
        DeepOptEqSegmenter(channels=3)
    with pytest.raises(ConfigError, match="at least one unit"):
        DeepOptEqSegmenter(hidden=())
    with pytest.raises(ConfigError, match=r"`backbone` to be one of resnet18.*, got 'vgg'"):
        FCNSegmenter(backbone="vgg")
    with pytest.raises(ConfigError, match="from 1 to 4 `stages`"):
        FCNSegmenter(stages=5)
    for network in (DeepOptEqSegmenter(**SMALL), FCNSegmenter(backbone="resnet18")):
        with pytest.raises(ShapeError, match=r"images of shape \(batch, 3, height, width\)"):
            network(torch.randn(2, 1, 16, 16))
