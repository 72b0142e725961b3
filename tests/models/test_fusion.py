"""Fusion of branches: formulas, sizes and bad input."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from opteq.errors import ConfigError, ShapeError
from opteq.models.fusion import Fusion, PooledFeatures, resample


def branches(*sizes, channels=3, batch=2):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, channels, h, w, generator=generator) for h, w in sizes)


def at_size(z, height, width):
    """Resampling by NumPy: means of blocks, or every pixel repeated."""
    z = z.numpy()
    h, w = z.shape[2:]
    if h >= height:
        return z.reshape(*z.shape[:2], height, h // height, width, w // width).mean((3, 5))
    return np.kron(z, np.ones((height // h, width // w)))


SIZES = [(8, 4), (4, 2), (2, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wanted", SIZES)
def test_resampling_averages_blocks_or_repeats_pixels_and_keeps_the_mean(size, wanted):
    z, like = branches(size, wanted)
    result = resample(z, like)
    np.testing.assert_allclose(result, at_size(z, *wanted), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.mean((2, 3)), z.mean((2, 3)))


@pytest.mark.spec("R5.1")
def test_sum_and_average_over_branches_of_different_sizes():
    z = branches(*SIZES)
    fused = Fusion("sum", 3, 3)(z)
    assert [f.shape for f in fused] == [z_i.shape for z_i in z]
    for f, size in zip(fused, SIZES, strict=True):
        np.testing.assert_allclose(f, sum(at_size(z_j, *size) for z_j in z), rtol=1e-4, atol=1e-5)
    (average,) = Fusion("average", 3, 3)(z)
    np.testing.assert_allclose(average, fused[0].numpy() / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.spec("R5.1")
def test_conv_fusion_has_a_convolution_per_pair():
    torch.manual_seed(0)
    z = branches((4, 4), (2, 2))
    module = Fusion("conv", 2, 3)
    assert sum(p.numel() for p in module.parameters()) == 4 * 9 * 3 * 3
    kernels = [[k.weight for k in module.kernels[:2]], [k.weight for k in module.kernels[2:]]]
    for f, z_i, row in zip(module(z), z, kernels, strict=True):
        expected = sum(
            F.conv2d(torch.tensor(at_size(z_j, *z_i.shape[2:]), dtype=torch.float32), k, padding=1)
            for z_j, k in zip(z, row, strict=True)
        )
        torch.testing.assert_close(f, expected)


def test_the_number_of_outputs_is_the_announced_one():
    z = branches((4, 4), (4, 4))
    for name in ("concat", "sum", "conv", "average"):
        module = Fusion(name, 2, 3)
        assert len(module(z)) == module.outputs
    assert all(a is b for a, b in zip(Fusion("concat", 2, 3)(z), z, strict=True))
    assert Fusion("concat", 2, 3).lipschitz(z) == 1


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="`fusion` to be one of concat, sum, conv, average, got 'max'"):
        Fusion("max", 2, 3)
    with pytest.raises(ShapeError, match=r"sizes divide one another, got \(4, 4\) and \(6, 6\)"):
        Fusion("sum", 2, 3)(branches((6, 6), (4, 4)))


def positive(stage):
    for weight in stage.parameters():
        weight.data.abs_()
    return stage


def joined(z):
    return torch.cat([t.flatten(1) for t in ((z,) if isinstance(z, torch.Tensor) else z)], 1)


@pytest.mark.spec("R5.1")
@pytest.mark.parametrize(
    ("stage", "looseness"),
    [
        (Fusion("sum", 3, 2), 1e-9),
        (Fusion("average", 3, 2), 1e-9),
        (PooledFeatures(1), 1e-9),
        (PooledFeatures(2), 1e-9),
        (positive(Fusion("conv", 3, 2)), 0.5),
    ],
    ids=lambda v: getattr(v, "kind", type(v).__name__),
)
def test_lipschitz_constants_against_the_dense_matrix(stage, looseness):
    torch.manual_seed(0)
    sizes = [(8, 4), (4, 2), (4, 2)]
    numbers = [2 * h * w for h, w in sizes]
    basis = torch.eye(sum(numbers), dtype=torch.float64).split(numbers, 1)
    z = tuple(b.reshape(-1, 2, *size) for b, size in zip(basis, sizes, strict=True))
    norm = torch.linalg.matrix_norm(joined(stage.double()(z)), 2).item()
    assert norm <= stage.lipschitz(z) <= (1 + looseness) * norm
