import pytest
import torch
from torch import nn

from opteq.errors import ConfigError, ShapeError
from opteq.models.heads import BranchNorm, Head, PixelHead, ResNetHead
from tests.models.test_fusion import branches
from tests.networks import count


def test_every_branch_is_normalised_and_averaged_by_itself():
    torch.manual_seed(0)
    head, z = Head(3, 4, branches=2, pool=2), branches((8, 4), (4, 4), batch=6)
    joined = []
    for z_i in z:
        deviation = (z_i.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        normal = ((z_i - z_i.mean((0, 2, 3), keepdim=True)) / deviation).relu()
        h, w = z_i.shape[2:]
        joined.append(normal.reshape(6, 3, 2, h // 2, 2, w // 2).mean((3, 5)).flatten(1))
    linear = head[-1]
    expected = torch.cat(joined, 1) @ linear.weight.mT + linear.bias
    torch.testing.assert_close(head(z), expected, rtol=1e-4, atol=1e-5)


def test_without_norm_the_head_is_a_mean_and_a_linear_layer():
    head, (z,) = Head(3, 4, norm=False), branches((4, 4))
    expected = z.mean((2, 3)) @ head[-1].weight.mT + head[-1].bias
    torch.testing.assert_close(head(z), expected)
    torch.testing.assert_close(head((z,)), expected)
    assert count(head) == 3 * 4 + 4


@pytest.mark.parametrize(
    ("fusion", "joined", "kernels"), [("concat", 3, 0), ("sum", 3, 0), ("conv", 3, 9), ("average", 1, 0)]
)
def test_the_linear_layer_fits_every_fusion(fusion, joined, kernels):
    head = Head(2, 5, branches=3, fusion=fusion, pool=2)
    assert head(branches((4, 4), (2, 2), (2, 2), channels=2)).shape == (2, 5)
    assert count(head) == kernels * 9 * 2 * 2 + joined * (2 * 2 + 2 * 4 * 5) + 5


def test_dropout_acts_in_training_only():
    head, z = Head(3, 4, norm=False, dropout=1.0), branches((2, 2))
    torch.testing.assert_close(head(z), head[-1].bias.expand(2, 4))
    assert not torch.allclose(head.eval()(z), head[-1].bias.expand(2, 4))


@pytest.mark.spec("R5.1")
def test_the_lipschitz_constant_of_the_norms_is_that_of_the_largest():
    norms = BranchNorm(2, 2).double().eval()
    z = branches((2, 2), (1, 1), channels=2)
    for norm, scale in zip(norms.norms, (0.5, 3.0), strict=True):
        norm[0].weight.data.fill_(scale)
        norm[0].bias.data.fill_(100.0)  # so that no ReLU cuts
    z = tuple(t.double() for t in z)
    expected = 3 / (1 + 1e-5) ** 0.5
    assert norms.lipschitz(z) == pytest.approx(expected, rel=1e-9)
    moved = norms((z[0], z[1] + 1))[1] - norms(z)[1]
    assert moved.abs().max().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.spec("R2.7")
def test_the_head_of_table_6():
    head = ResNetHead(512, 1000)
    assert count(head) == 512 * 1024 + 1024 + 1024 * 2048 + 2048 + 2048 * 1000 + 1000
    assert head(torch.randn(2, 512, 5, 7)).shape == (2, 1000)


def test_the_head_of_pixels_keeps_the_size():
    head = PixelHead(8, 3)
    assert head(torch.randn(2, 8, 5, 7)).shape == (2, 3, 5, 7)
    assert count(head) == 9 * 8 * 2 + 2 * 2 + 2 * 3 + 3


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r"`dropout` to be a probability from 0 to 1, got 2\.0"):
        Head(3, 4, dropout=2.0)
    with pytest.raises(ConfigError, match="`fusion` to be one of concat, sum, conv, average"):
        Head(3, 4, fusion="max")
    for name in ("channels", "classes", "branches", "pool"):
        with pytest.raises(ConfigError, match=f"`{name}` to be a whole number of at least 1, got 0"):
            Head(**{"channels": 3, "classes": 4, name: 0})
    with pytest.raises(ConfigError, match="at least 4 `channels`"):
        PixelHead(3, 4)
    with pytest.raises(ShapeError, match="Expected 1 branches, got 2; set `branches` of the head"):
        nn.Sequential(Head(3, 4))(branches((4, 4), (2, 2)))
