"""Forces on patches in C, against formulas written out patch by patch in float64."""

import pytest
import torch

from opteq import Conv2d, GaussianMap, Patches, native
from opteq.native.forces import forces_in_place

# Channels and size of a patch, channels and sides of the images.
SHAPES = [
    ((8, 2), (64, 16, 16)),
    ((4, 2), (8, 6, 4)),
    ((16, 1), (32, 3, 5)),
    ((3, 1), (9, 5, 7)),
    ((5, 3), (10, 6, 9)),
    ((2, 2), (4, 2, 2)),
    ((70, 1), (70, 3, 3)),
    ((1, 1), (1, 1, 1)),
]
every_shape = pytest.mark.parametrize(("cut", "shape"), SHAPES, ids=str)


pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")


def problem(cut, shape, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, *shape, generator=generator).contiguous(memory_format=torch.channels_last)
    patches = Patches(*cut)
    root = torch.randn(patches.dimension, 5, generator=generator) / patches.dimension**0.5
    return image, patches, root @ root.mT, torch.rand(batch, generator=generator)


def patches_of(image, cut):
    """Yields `(sample, place)` of every patch, the place an index into the image."""
    channels, size = cut
    for b, c, y, x in torch.cartesian_prod(
        *(torch.arange(0, n, s) for n, s in zip(image.shape, (1, channels, size, size), strict=True))
    ).tolist():
        yield b, (b, slice(c, c + channels), slice(y, y + size), slice(x, x + size))


def metric(gram, patch):
    """`G r` of a patch `(c, p, p)`, whose numbers `G` counts pixel by pixel."""
    flat = patch.permute(1, 2, 0).reshape(-1)
    return (gram @ flat).view(*patch.shape[1:], -1).permute(2, 0, 1)


def off(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@every_shape
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_forces(cut, shape, threads):
    image, _, gram, gamma = problem(cut, shape)
    exact = image.double()
    for b, place in patches_of(image, cut):
        r = image.double()[place]
        projected = metric(gram.double(), r)
        exact[place] = -torch.exp(-gamma.double()[b] * (r * projected).sum()) * projected
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            found = forces_in_place(image, *cut, gram, gamma, error=1e-4)
    finally:
        torch.set_num_threads(before)
    assert found is image
    assert off(found, exact) < 2e-6


@every_shape
def test_responses_are_derivatives_of_the_forces(cut, shape):
    r, patches, gram, gamma = problem(cut, shape)
    q = problem(cut, shape, seed=1)[0]
    exact = torch.empty_like(q, dtype=torch.float64)

    def force(patch, b):
        projected = metric(gram.double(), patch)
        return -torch.exp(-gamma.double()[b] * (patch * projected).sum()) * projected

    for b, place in patches_of(r, cut):
        at, change = r.double()[place], 1e-5 * q.double()[place]
        exact[place] = (force(at + change, b) - force(at - change, b)) / 2e-5
    residual = patches.split(r)
    projected = residual @ gram
    weight = torch.exp(-gamma[:, None, None] * (residual * projected).sum(-1, keepdim=True))
    with torch.no_grad():
        found = forces_in_place(q, *cut, gram, gamma, projected, weight, error=1e-4)
    assert found is q
    assert off(found, exact) < 2e-6


def refused(image, gram, gamma, cut=(4, 2), error=1e-4):
    before = image.detach().clone()
    return forces_in_place(image, *cut, gram, gamma, error=error) is None and torch.equal(image, before)


def test_what_is_for_pytorch_to_do_is_left_alone():
    image, _, gram, gamma = problem((4, 2), (8, 6, 4))
    assert refused(image.contiguous(), gram, gamma)
    assert refused(image.double(), gram, gamma)
    assert refused(image, gram.double(), gamma)
    assert refused(image[:, :, :, :2], gram, gamma)  # with gaps between its rows
    assert refused(image, gram, gamma, error=0.0)
    assert refused(image.clone().requires_grad_(), gram, gamma)
    assert refused(image, gram, gamma.clone().requires_grad_())
    with torch.autocast("cpu"):
        assert refused(image, gram, gamma)
    # What does not fit, which C would read beyond its end.
    assert refused(image, gram[:8, :8].contiguous(), gamma)
    assert refused(image, gram, gamma[:2])
    assert refused(image, gram, gamma[:1].expand(3))
    projected, weight = torch.zeros(3, 11, 16), torch.zeros(3, 12, 1)
    assert forces_in_place(image, 4, 2, gram, gamma, projected, weight, error=1e-4) is None


def test_a_batch_without_samples_and_numbers_that_are_not_finite():
    image, _, gram, gamma = problem((4, 2), (8, 6, 4))
    assert forces_in_place(image[:0], 4, 2, gram, gamma[:0], error=1e-4) is not None
    image[1, 0, 0, 0] = torch.nan
    found = forces_in_place(image, 4, 2, gram, gamma, error=1e-4)
    assert found[1, :4, :2, :2].isnan().all()
    assert found.isnan().sum() == 16


def test_a_map_is_the_same_with_and_without_it(monkeypatch):
    torch.manual_seed(0)
    unit = GaussianMap(Conv2d(6, 8), Conv2d(3, 8), patches=Patches(4, 2), hidden=7)
    x, y = torch.randn(3, 3, 6, 4), torch.randn(3, 6, 6, 4).contiguous(memory_format=torch.channels_last)
    results = []
    for enabled in (True, False):
        monkeypatch.setattr(native, "enabled", enabled)
        with torch.no_grad():
            equation = unit.bind(x, error=1e-6).detach()
            linearization = equation.linearize(y)
            results.append([equation(y), equation.first_iterate(), linearization.jvp(y)])
    for a, b in zip(*results, strict=True):
        assert not torch.equal(a, torch.zeros_like(a))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_images_that_do_not_divide_are_left_alone():
    for shape in ((8, 64, 65), (8, 65, 64), (12, 64, 64)):
        image = torch.randn(2, *shape).contiguous(memory_format=torch.channels_last)
        assert refused(image, torch.eye(32), torch.ones(2), cut=(8, 2))
