"""Classifiers composed of parts: what they compute, certify and refuse, for images and for pixels."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.segmentation import fcn_resnet50

from opteq import Unrolled, robust_radius, solve_log
from opteq.errors import ConfigError, ShapeError
from opteq.models.bodies import Coupled, Deep, Stack, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head, PixelHead
from opteq.models.stems import ConvStem, ResNetStem
from opteq.theory.lipschitz import lipschitz_bound
from tests.networks import branch_classifier, count, unit_classifier


def test_logits_are_those_of_head_body_and_stem():
    torch.manual_seed(0)
    network, x = branch_classifier(Coupled).eval(), torch.randn(2, 3, 8, 8)
    z = network.features(x)
    assert [type(z), *map(len, z)] == [tuple, 2, 2]
    torch.testing.assert_close(network.head(z), network(x))
    torch.testing.assert_close(nn.Sequential(*network.stages)(x), network(x))


def test_it_knows_its_equilibrium_layers_in_order():
    bodies = [Unit(8, 4), Unit(8, 6)]
    network = ImageClassifier(ConvStem(3, 8), Stack(bodies), Head(8, 10))
    assert network.equilibrium_layers == bodies
    assert network(torch.randn(2, 3, 6, 6)).shape == (2, 10)


def test_it_is_certified_through_all_parts():
    torch.manual_seed(0)
    network, x = (
        unit_classifier(in_channels=1, max_norm=0.5).double().eval(),
        torch.randn(3, 1, 6, 6).double(),
    )
    parts = [lipschitz_bound(network.stem, x), lipschitz_bound(network.body, network.stem(x))]
    parts.append(lipschitz_bound(network.head, network.features(x)))
    expected = torch.stack([part.value for part in parts]).prod()
    torch.testing.assert_close(lipschitz_bound(network, x).value, expected)
    assert (robust_radius(network, x) > 0).all()


def test_it_is_copied_and_pickled():
    network, x = branch_classifier().eval(), torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        torch.testing.assert_close(other(x), network(x))


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"images of shape \(batch, 3, height, width\), got \(2, 1, 8, 8\)"):
        unit_classifier()(torch.randn(2, 1, 8, 8))
    for dtype in (torch.uint8, torch.float64):
        message = rf"images of torch.float32, got {dtype}; convert them with images.to\(torch.float32\)"
        with pytest.raises(ShapeError, match=message):
            unit_classifier()(torch.zeros(1, 3, 8, 8, dtype=dtype))
    # A stem of one's own need not say how many channels it takes.
    own = ImageClassifier(nn.Conv2d(1, 4, 3), Unit(4, 4), Head(4, 2))
    assert own(torch.randn(2, 1, 8, 8)).shape == (2, 2)
    with pytest.raises(ShapeError, match=r"images of shape \(batch, 1, height, width\), got \(2, 3, 8, 8\)"):
        own(torch.randn(2, 3, 8, 8))
    with pytest.raises(ShapeError, match=r"\(batch, channels, height, width\), got \(4, 8\)"):
        ImageClassifier(nn.Identity(), nn.Identity(), nn.Identity())(torch.randn(4, 8))


def segmenter(classes=19, channels=512, hidden=(256, 512, 512), downsamplings=3, **options):
    body = Deep(channels, hidden, start="input", **options)
    return ImageClassifier(ConvStem(3, channels, downsamplings), body, PixelHead(channels, classes))


def fcn(classes, backbone="resnet50", stages=4, channels=2048):
    return ImageClassifier(ResNetStem(3, backbone, stages), nn.Identity(), PixelHead(channels, classes))


@pytest.mark.spec("R2.8")
def test_the_segmenter_has_three_weighted_layers_of_the_published_channels():
    with torch.device("meta"):
        network = segmenter()
    assert [unit.W.out_channels for unit in network.body.map.units] == [256, 512, 512]
    kernels = sum(2 * 512 * n * 9 + n for n in (256, 512, 512))
    assert count(network.body) == kernels
    stem = sum(9 * a * b + 2 * b for a, b in pairwise((3, 128, 256, 512)))
    head = 9 * 512 * 128 + 2 * 128 + 128 * 19 + 19
    assert count(network) == kernels + stem + head == 13_870_099


@pytest.mark.spec("R2.8")
@pytest.mark.parametrize("size", [(16, 24), (15, 17)])
def test_there_is_a_logit_for_every_class_and_pixel(size):
    torch.manual_seed(0)
    network, x = segmenter(3, 8, (4, 8, 8), 1).eval(), torch.randn(2, 3, *size)
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
    "make",
    [
        lambda: segmenter(3, 12, (6, 12, 12), 1),
        lambda: segmenter(3, 12, (6, 12, 12), 1, gradient=Unrolled(4), learn_alpha=True),
        lambda: fcn(3, "resnet18", 1, 64),
    ],
    ids=["implicit", "unrolled", "fcn"],
)
def test_segmenters_learn_to_tell_colours_apart(make):
    torch.manual_seed(0)
    network = make()
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
def test_the_fcn_is_torchvisions():
    torch.manual_seed(0)
    theirs = fcn_resnet50(weights=None, weights_backbone=None, num_classes=5).eval()
    ours = fcn(5).eval()
    names = list(ours.state_dict())
    assert len(names) == len(theirs.state_dict())
    ours.load_state_dict(dict(zip(names, theirs.state_dict().values(), strict=True)))
    x = torch.randn(1, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x)["out"])


def test_a_classifier_of_pixels_has_no_radius():
    with pytest.raises(ShapeError, match="Expected a classifier with logits"):
        robust_radius(segmenter(3, 8, (4,), 0).eval(), torch.randn(1, 3, 8, 8))
    with pytest.raises(ConfigError, match="gives something else than its `stages`"):
        lipschitz_bound(segmenter(3, 8, (4,), 1, max_norm=0.5).eval(), torch.randn(1, 3, 8, 8))
