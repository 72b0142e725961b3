"""The Gaussian kernel map against plain loops and the rules for its width."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, GaussianMap, Patches
from opteq.errors import ConfigError, ShapeError
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from tests.conformance.instances import MAPS, seeded
from tests.conformance.reference import random


def similarity_of(module: GaussianMap, x: torch.Tensor) -> GaussianSimilarity:
    equation = module.bind(x)
    assert isinstance(equation, SimilarityEquation)
    assert isinstance(equation.similarity, GaussianSimilarity)
    return equation.similarity


def patched(**options) -> GaussianMap:
    module = seeded(lambda: GaussianMap(Conv2d(2, 4), Conv2d(2, 4), Patches(2, 2), hidden=5, **options))
    assert module.injection.bias is not None
    torch.nn.init.normal_(module.injection.bias, generator=torch.Generator().manual_seed(0))
    return module


def blocks(image: np.ndarray, channels: int, size: int) -> list[tuple[slice, slice, slice]]:
    """Where the patches of `(C, H, W)` lie."""
    c, h, w = image.shape
    return [
        (slice(k, k + channels), slice(i, i + size), slice(j, j + size))
        for i in range(0, h, size)
        for j in range(0, w, size)
        for k in range(0, c, channels)
    ]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=5)
@pytest.mark.spec("R6.2")
def test_one_step_of_the_published_algorithm(seed: int):
    module = patched(max_norm=None)
    x, y = random(2, 2, 4, 4, seed=seed), random(2, 2, 4, 4, seed=seed + 1)
    assert module.projection is not None
    hidden = module.projection.detach().numpy()
    c = module.injection(x).detach()
    mapped = module.W(y).detach()
    pooled = torch.zeros_like(c)
    for sample in range(2):
        residual = (c - mapped)[sample].numpy()
        start = c[sample].numpy()

        def vector(image, place):
            return image[place].transpose(1, 2, 0).ravel()  # row, column, channel

        distances = [np.sum((vector(start, p) @ hidden) ** 2) for p in blocks(start, 2, 2)]
        gamma = 0.2 / max(min(distances), 0.01 * np.mean(distances))
        for place in blocks(residual, 2, 2):
            r = vector(residual, place) @ hidden
            back = math.exp(-gamma * np.sum(r**2)) * r @ hidden.T
            pooled[sample][place] = torch.from_numpy(back.reshape(2, 2, 2).transpose(2, 0, 1).copy())
    expected = torch.relu(module.W.bind((2, 4, 4)).adjoint(pooled))
    torch.testing.assert_close(module.bind(x)(y), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.spec("R6.2")
def test_the_plain_kernel_takes_the_sample_as_a_whole():
    module = seeded(lambda: GaussianMap(Dense(3, 5), Dense(2, 5), gamma=0.5, bias=False))
    x, y = random(4, 2), random(4, 3, seed=1)
    (W,) = module.W.weights
    for xi, yi, computed in zip(x, y, module.bind(x)(y), strict=True):
        r = module.injection(xi[None])[0] - W @ yi
        torch.testing.assert_close(computed, torch.relu(torch.exp(-0.5 * r @ r) * W.mT @ r))


@pytest.mark.spec("R6.3")
def test_adaptive_gamma_is_a_fifth_of_the_smallest_starting_distance():
    module = patched()
    similarity = similarity_of(module, random(3, 2, 4, 4))
    weights = similarity.attention(similarity.initial())
    # So the nearest patch starts with weight e^{-0.2} = 0.82.
    torch.testing.assert_close(weights.amax(1), torch.full((3,), math.exp(-0.2), dtype=torch.float64))
    r = similarity.patches.split(similarity.injection)
    distance = torch.einsum("bni,ij,bnj->bn", r, similarity.gram, r)
    torch.testing.assert_close(similarity.gamma, 0.2 / distance.amin(1))


@pytest.mark.spec("R6.3")
def test_gamma_by_the_mean_is_a_fifth_of_the_mean_starting_distance():
    module, x = patched(gamma="mean"), random(3, 2, 4, 4)
    similarity = similarity_of(module, x)
    r = similarity.patches.split(similarity.injection)
    distance = torch.einsum("bni,ij,bnj->bn", r, similarity.gram, r)
    torch.testing.assert_close(similarity.gamma, 0.2 / distance.mean(1))
    assert (similarity.gamma < similarity_of(patched(), x).gamma).all()


@pytest.mark.spec("R6.3")
@pytest.mark.parametrize("gamma", ["adaptive", "mean"])
def test_gamma_is_per_sample(gamma):
    module, x = patched(gamma=gamma), random(4, 2, 4, 4)
    x[1] *= 100
    alone = [similarity_of(module, x[i : i + 1]).gamma for i in range(4)]
    torch.testing.assert_close(similarity_of(module, x).gamma, torch.cat(alone), rtol=1e-12, atol=0)


@pytest.mark.spec("R6.3")
def test_fixed_gamma():
    similarity = similarity_of(patched(gamma=0.5), random(3, 2, 4, 4))
    assert torch.equal(similarity.gamma, torch.full((3,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.spec("R6.3")
def test_gradients_pass_through_gamma_unless_detached_in_training(detach: bool, training: bool):
    layer = EquilibriumLayer(patched(detach_gamma=detach), Anderson(tol=1e-13, max_steps=500))
    layer.train(training)
    x, direction = random(2, 2, 4, 4), random(2, 2, 4, 4, seed=1)
    cotangent = random(2, 2, 4, 4, seed=2)

    def value(x):
        return (cotangent * layer(x)).sum()

    step = 1e-5
    difference = ((value(x + step * direction) - value(x - step * direction)) / (2 * step)).item()
    x.requires_grad_()
    layer.gradient = type(layer.gradient)(tol=1e-12, max_steps=500)
    gradient = (torch.autograd.grad(value(x), x)[0] * direction).sum().item()
    if detach and training:
        assert abs(gradient - difference) > 1e-3 * abs(difference)
    else:
        assert gradient == pytest.approx(difference, rel=1e-7)


@pytest.mark.spec("R6.3")
def test_a_patch_that_starts_at_its_injection_leaves_the_others_alive():
    module = patched()
    with torch.no_grad():
        assert module.injection.bias is not None
        module.injection.bias.zero_()
    x = random(2, 2, 6, 6)
    x[:, :, :4, :4] = 0  # the first patch of the injection, two pixels wide, is zero
    similarity = similarity_of(module, x)
    assert not similarity.patches.split(similarity.injection)[:, 0].any()
    assert torch.isfinite(similarity.gamma).all()
    weights = similarity.attention(similarity.initial())
    assert weights[:, 0].min() == 1
    r = similarity.patches.split(similarity.injection)
    distance = torch.einsum("bni,ij,bnj->bn", r, similarity.gram, r)
    torch.testing.assert_close(similarity.gamma, 0.2 / (0.01 * distance.mean(1)))


@pytest.mark.spec("R6.3")
def test_an_input_of_zeros_has_an_equilibrium_and_finite_gradients():
    module = patched()
    with torch.no_grad():
        assert module.injection.bias is not None
        module.injection.bias.zero_()
    x = torch.zeros(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    z = EquilibriumLayer(module)(x)
    z.sum().backward()
    assert not z.any()
    assert x.grad is not None
    assert all(torch.isfinite(t.grad).all() for t in (x, *module.parameters()) if t.grad is not None)


@pytest.mark.parametrize("gain", [0.1, 30.0])
@pytest.mark.spec("R6.4")
def test_the_projection_is_kept_below_one(gain: float):
    module = patched()
    assert module.projection is not None
    with torch.no_grad():
        module.projection.mul_(gain)
    norm = torch.linalg.matrix_norm(module.projection, 2).item()
    gram = similarity_of(module, random(1, 2, 4, 4)).gram
    assert gram is not None
    assert torch.linalg.matrix_norm(gram, 2).item() == pytest.approx(min(1.0, norm**2), rel=1e-12)
    module.max_norm = None
    gram = similarity_of(module, random(1, 2, 4, 4)).gram
    torch.testing.assert_close(gram, module.projection @ module.projection.mT)


@pytest.mark.spec("R6.4")
def test_the_local_bound_is_sharper_away_from_the_injection():
    similarity = similarity_of(MAPS["gaussian-plain"].map(), MAPS["gaussian-plain"].inputs())
    y = 10 * random(*similarity.initial().shape)
    everywhere, here = similarity.hessian_bound().value, similarity.hessian_bound(y).value
    torch.testing.assert_close(here, everywhere * 2 * math.exp(-1.5))


@pytest.mark.spec("R6.2")
def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ShapeError, match=r"H, W by 2 for Patches.* got \(1, 4, 5, 4\); change the patches"):
        patched().bind(random(1, 2, 5, 4))
    with pytest.raises(ConfigError, match="4 channels of `W` to divide into patches of 3"):
        GaussianMap(Conv2d(2, 4), Conv2d(2, 4), Patches(3, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": "adaptiv"}, "`gamma` to be a positive number, 'adaptive' or 'mean', got 'adaptiv'"),
        ({"gamma": 0.0}, "`gamma` to be a positive number"),
        ({"gamma": math.inf}, "`gamma` to be a positive number"),
        ({"gamma": True}, "`gamma` to be a positive number"),
        ({"patches": (2, 2)}, r"`patches` to be Patches\(channels, size\) or None, got \(2, 2\)"),
        ({"detach_gamma": "x"}, "`detach_gamma` to be True or False, got 'x'"),
        ({"hidden": 0}, "`hidden` to be a whole number of at least 1, got 0"),
        ({"hidden": 2.5}, "`hidden` to be a whole number of at least 1, got 2.5"),
        ({"max_norm": "1"}, "`max_norm` to be positive or None, got '1'"),
        ({"max_norm": 0.0}, "`max_norm` to be positive or None"),
        ({"activation": "swish"}, "`activation` to be one of"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GaussianMap(Conv2d(2, 4), Conv2d(2, 4), **options)


@pytest.mark.parametrize("patches", [None, Patches(2, 2)], ids=repr)
def test_an_empty_batch(patches):
    layer = EquilibriumLayer(GaussianMap(Conv2d(2, 4), Conv2d(2, 4), patches))
    y = layer(torch.randn(0, 2, 4, 4))
    assert y.shape == (0, 2, 4, 4)
    y.sum().backward()


@pytest.mark.spec("R6.1")
def test_a_fixed_gamma_that_switches_the_map_off_is_reported_once():
    x = torch.randn(3, 2, 8, 8)
    x[1:] *= 20
    module = GaussianMap(Conv2d(2, 4), Conv2d(2, 4), gamma=0.01)
    layer = EquilibriumLayer(module)
    message = "gamma=0.01 .* below 1e-06 for 2 of 3 samples, where y is next to 0 .* use gamma='adaptive'"
    with pytest.warns(RuntimeWarning, match=message):
        y = layer(x)
    assert y[1:].abs().max() < 1e-4 < 1e-2 < y[0].abs().max()
    layer(x)
    EquilibriumLayer(GaussianMap(Conv2d(2, 4), Conv2d(2, 4)))(x)


@pytest.mark.spec("R6.1")
def test_a_trial_in_eval_mode_does_not_hide_what_training_makes_of_the_weights():
    x = torch.randn(3, 2, 8, 8)
    layer = EquilibriumLayer(GaussianMap(Conv2d(2, 4), Conv2d(2, 4), gamma=0.01))
    layer.eval()(x)
    layer.train()(x)
    for _ in range(19):
        layer(20 * x)
    with pytest.warns(RuntimeWarning, match="below 1e-06 for 3 of 3 samples"):
        layer(20 * x)
