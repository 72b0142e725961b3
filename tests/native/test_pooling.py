"""Means over blocks of pixels in C, against reshapes in float64, and their adjoint against autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from opteq import AveragePool, native
from opteq.native import pooling

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")

# Channels and sides of the means, and the side of a block.
SHAPES = [
    ((8, 4, 4), 2),
    ((128, 16, 16), 2),
    ((11, 3, 5), 3),
    ((16, 1, 1), 4),
    ((9, 2, 7), 1),
    ((33, 1, 3), 8),
]
every_shape = pytest.mark.parametrize(("small", "factor"), SHAPES, ids=str)


def images(batch, channels, height, width, gap=0):
    """With channels last, and so many numbers between one image and the next."""
    generator = torch.Generator().manual_seed(height)
    rows = torch.randn(batch, height * width * channels + gap, generator=generator)
    return rows[:, gap:].unflatten(1, (height, width, channels)).permute(0, 3, 1, 2)


def large(small, factor, batch=3, gap=0):
    channels, height, width = small
    return images(batch, channels, factor * height, factor * width, gap)


def with_threads(count, function, *arguments):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)


@every_shape
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_means(small, factor, gap, threads):
    x = large(small, factor, gap=gap)
    assert pooling.fits_average(x, factor)
    found = with_threads(threads, pooling.average, x, factor)
    channels, height, width = small
    exact = x.double().reshape(3, channels, height, factor, width, factor).mean((3, 5))
    assert torch.allclose(found.double(), exact, rtol=0, atol=1e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)


@every_shape
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_spreading_is_the_adjoint(small, factor, gap, threads):
    y = images(3, *small).contiguous(memory_format=torch.channels_last)
    x = torch.zeros(3, small[0], *(factor * n for n in small[1:]), dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad((F.avg_pool2d(x, factor) * y).sum(), x)
    assert pooling.fits_spread(y, factor, None)
    assert torch.allclose(with_threads(threads, pooling.spread, y, factor).double(), exact, rtol=1e-6)
    total = large(small, factor, gap=gap)
    before = total.double()
    assert pooling.fits_spread(y, factor, total)
    assert with_threads(threads, pooling.spread, y, factor, total) is total
    assert torch.allclose(total.double(), before + exact, rtol=0, atol=1e-6)


def test_adding_leaves_the_gaps_alone():
    rows = torch.ones(2, 3 + 4 * 4 * 8)
    total = rows[:, 3:].unflatten(1, (4, 4, 8)).permute(0, 3, 1, 2)
    pooling.spread(images(2, 8, 2, 2).contiguous(memory_format=torch.channels_last), 2, total)
    assert (rows[:, :3] == 1).all()


def test_what_does_not_fit_is_left_to_pytorch():
    x = large((8, 2, 2), 2)
    assert not pooling.fits_average(x.contiguous(), 2)
    assert not pooling.fits_average(x.double(), 2)
    assert not pooling.fits_average(x, 3)
    assert not pooling.fits_average(x[:, :4].contiguous(memory_format=torch.channels_last), 2)
    y = images(3, 8, 2, 2).contiguous(memory_format=torch.channels_last)
    assert not pooling.fits_spread(y, 2, large((8, 2, 3), 2))
    assert not pooling.fits_spread(y, 2, x.contiguous())
    assert not pooling.fits_spread(y[:1].expand(3, -1, -1, -1), 2, None)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_the_graph(layout):
    operator = AveragePool(8, 2)
    x = large((8, 3, 2), 2).contiguous(memory_format=layout).requires_grad_()
    bound = operator.bind(tuple(x.shape[1:]))
    upstream = images(3, 8, 3, 2).contiguous(memory_format=layout).requires_grad_()
    (found,) = torch.autograd.grad(bound(x), x, upstream)
    (exact,) = torch.autograd.grad(F.avg_pool2d(x, 2), x, upstream)
    assert torch.allclose(found, exact)
    (found,) = torch.autograd.grad(bound.adjoint(upstream), upstream, x)
    assert torch.allclose(found, F.avg_pool2d(x, 2))


@pytest.mark.filterwarnings("ignore:Input #[01] requires gradient and is not a double precision")
def test_gradients_have_gradients():
    bound = AveragePool(8, 2).bind((8, 4, 2))
    x, y = large((8, 2, 1), 2, batch=1).requires_grad_(), images(1, 8, 2, 1).requires_grad_()
    steps = {"eps": 1e-2, "atol": 1e-2}
    for function, at in ((bound, x), (bound.adjoint, y)):
        assert gradcheck(function, at, **steps)
        assert gradgradcheck(lambda t, function=function: function(t).square(), at, **steps)


def test_adding_into_a_graph():
    bound = AveragePool(8, 2).bind((8, 4, 4))
    y = images(2, 8, 2, 2).contiguous(memory_format=torch.channels_last).requires_grad_()
    total = torch.ones(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    (found,) = torch.autograd.grad(bound.add_adjoint(total.clone(), y).square().sum(), y)
    (exact,) = torch.autograd.grad((total + bound.adjoint(y)).square().sum(), y)
    assert torch.allclose(found, exact)
