"""Attention weights against a loop over patches."""

import numpy as np
import pytest
import torch

from opteq import Conv2d, EquilibriumLayer, GaussianMap, OptEqUnit, Patches
from opteq.evaluation.attention import patch_attention
from opteq.models.bodies import Gaussian


def by_hand(branch, x, y):
    """Mean weight of the patches at every place, from the definition."""
    c = branch.injection(x)
    equation = branch.bind(x)
    rest = (c - equation.similarity.W(y)).detach()
    gram, gamma = equation.similarity.gram.detach(), equation.similarity.gamma.detach()
    size, group = branch.patches.size, branch.patches.channels
    batch, channels, height, width = rest.shape
    weights = np.zeros((batch, height // size, width // size))
    for n, i, j in np.ndindex(weights.shape):
        for k in range(channels // group):
            block = rest[n, k * group : (k + 1) * group, i * size : (i + 1) * size, j * size : (j + 1) * size]
            # A patch lists its pixels row by row, each with its channels.
            r = block.permute(1, 2, 0).reshape(-1)
            weights[n, i, j] += torch.exp(-gamma[n] * (r @ gram @ r)).item() * group / channels
    return weights


@pytest.mark.spec("R6.2")
def test_weights_of_the_patches_at_the_equilibrium():
    torch.manual_seed(0)
    geq = GaussianMap(Conv2d(3, 4, 3), Conv2d(2, 4, 3), Patches(2, 2), hidden=5).double()
    x = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    y = EquilibriumLayer(geq)(x)
    attention = patch_attention(geq.bind(x), y)
    assert attention.shape == (2, 1, 2, 3)
    np.testing.assert_allclose(attention[:, 0].detach(), by_hand(geq, x, y), rtol=1e-10)


@pytest.mark.spec("R6.6")
def test_branches_are_spread_over_the_finest_one():
    torch.manual_seed(0)
    layer = Gaussian(4, (4, 4), reductions=(2, 1), patch_channels=2, patch_hidden=3).double()
    features = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    z = layer(features)
    attention = patch_attention(layer.bind(features), z).detach().numpy()
    assert attention.shape == (2, 2, 4, 4)
    coarse, fine = (by_hand(m, features, y) for m, y in zip(layer.map.maps, z, strict=True))
    np.testing.assert_allclose(attention[:, 1], fine, rtol=1e-10)
    np.testing.assert_allclose(attention[:, 0], np.kron(coarse, np.ones((2, 2))), rtol=1e-10)


def test_other_maps_have_none():
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4)
    for branch in (OptEqUnit(Conv2d(2, 3), Conv2d(2, 3)), GaussianMap(Conv2d(2, 3), Conv2d(2, 3))):
        assert patch_attention(branch.bind(x), x) is None
