"""What solvers do with rows, in C and with PyTorch, against float64."""

import pytest
import torch

from opteq.native import conjugate, rows
from opteq.native.serving import reads, takes

pytestmark = pytest.mark.usefixtures("way")


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def observe(image, x, f, g):
    return rows.observe(image, x, f, g, reads(x))


def hold(x, following, active):
    return rows.hold(x, following, active, reads(x))


def strided(batch, n):
    """A matrix whose rows lie apart, like those of one slot of a history."""
    return torch.full((batch, 3, n), torch.nan)[:, 1]


@pytest.mark.parametrize("widths", [(5,), (1,), (2048,), (2049, 3, 4100), (3000, 1)])
@pytest.mark.parametrize("batch", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_is_observed(widths, batch, dtype):
    n = sum(widths)
    parts = [drawn(batch, w, seed=i, dtype=dtype) for i, w in enumerate(widths)]
    x = drawn(batch, n, seed=9, dtype=dtype)
    f, g = strided(batch, n).to(dtype), strided(batch, n).to(dtype)
    changes, sizes = observe(parts, x, f, g).unbind(1)
    image = torch.cat(parts, 1)
    assert torch.equal(f, image)
    assert torch.equal(g, image - x)
    for found, exact in ((changes, g.double().norm(dim=1)), (sizes, f.double().norm(dim=1))):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


def test_parts_and_rooms_may_lie_apart():
    wide = drawn(4, 50)
    parts, x = [wide[:, 3:20], wide[:, 20:41]], drawn(4, 60, seed=1)[:, :38]
    f, g = strided(4, 38), strided(4, 38)
    observe(parts, x, f, g)
    assert torch.equal(f, wide[:, 3:41])
    assert torch.equal(g, wide[:, 3:41] - x)


def test_what_is_not_finite_stays_in_its_row():
    image, x = drawn(4, 3000), drawn(4, 3000, seed=1)
    image[1, 7], image[2, 2999] = torch.nan, torch.inf
    f, g = torch.empty(4, 3000), torch.empty(4, 3000)
    changes, sizes = observe([image], x, f, g).T.tolist()
    assert [str(c) for c in changes[1:3]] == ["nan", "inf"]
    assert [str(s) for s in sizes[1:3]] == ["nan", "inf"]
    assert all(0 < number < 100 for number in (changes[0], changes[3], sizes[0], sizes[3]))


def test_a_sign_that_is_still_to_be_applied_is_applied():
    image, f, g = drawn(3, 8), torch.empty(3, 8), torch.empty(3, 8)
    observe([torch._neg_view(image)], torch.zeros(3, 8), f, g)
    assert torch.equal(f, -image)


def test_columns_are_no_rows():
    # A matrix whose rows are not contiguous, which C does not read.
    image = drawn(30, 6).T
    f, g = torch.empty(6, 30), torch.empty(6, 30)
    observe([image], torch.zeros(6, 30), f, g)
    assert torch.equal(f, image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_have_stopped_are_held(dtype):
    x, following = strided(4, 9).to(dtype), drawn(4, 12, seed=1, dtype=dtype)[:, 1:10]
    x.copy_(drawn(4, 9, dtype=dtype))
    x[2, 3] = torch.nan
    found = hold(x, following, torch.tensor([True, False, True, False]))
    expected = torch.stack((following[0], x[1], following[2], x[3]))
    assert torch.equal(found, expected)
    found.fill_(0)
    assert following.abs().min() > 0


@pytest.mark.parametrize("n", [1, 40, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", [False, True])
def test_a_step_of_conjugate_gradients(n, dtype, metric):
    x, r, p, q, m, mr = (drawn(5, n, seed=i, dtype=dtype) for i in range(6))
    mp = m if metric else p
    q[0] = mp[0]  # curvature in the first and the last row, none in the third
    q[2] = -mp[2]
    q[4] = mp[4] * 0.5
    rr = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    active = torch.tensor([True, False, True, False, True])
    expected = [t.double().clone() for t in (x, r)]
    for row in (0, 4):
        alpha = rr[row] / (mp[row].double() @ q[row].double())
        expected[0][row] += alpha * p[row].double()
        expected[1][row] -= alpha * q[row].double()
    steps = torch.tensor([3, 3, 3, 3, 3])
    _, seen = conjugate.descend(x, r, p, q, mp, rr, active, steps, takes(x, r, p))
    assert active.tolist() == [True, False, False, False, True]
    assert steps.tolist() == [4, 3, 4, 3, 4]
    assert str(seen.tolist()) == "[2.0, nan, 4.0, nan, 6.0]"
    for found, exact in zip((x, r), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    mr = r.clone().mul_(2) if metric else r
    now = (r.double() * mr.double()).sum(1)
    goal = (now[0] * now[4]).sqrt().item()
    going = 4 if now[0] < now[4] else 0
    directions = [t.double().clone() for t in ((p, mp) if metric else (p,))]
    for direction, residual in zip(directions, (r, mr), strict=False):
        direction[going] = residual[going].double() + now[going] / rr[going] * direction[going]
    before = rr.clone()
    assert conjugate.turn(p, mp, r, mr, rr, goal, active, seen, takes(p, r)) == 1
    assert active.nonzero().flatten().tolist() == [going]
    torch.testing.assert_close(rr[[0, 4]], now[[0, 4]], rtol=1e-5, atol=0)
    assert torch.equal(rr[[1, 2, 3]], before[[1, 2, 3]])
    assert torch.equal(seen[[0, 4]], rr[[0, 4]])
    assert str(seen[1:4].tolist()) == "[nan, 4.0, nan]"
    torch.testing.assert_close(p[going].double(), directions[0][going], rtol=1e-5, atol=1e-5)
    if metric:
        torch.testing.assert_close(mp[going].double(), directions[1][going], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_of_image", [2, 5])
def test_an_image_of_another_batch_is_refused(rows_of_image):
    f, g = torch.empty(3, 8), torch.empty(3, 8)
    with pytest.raises(RuntimeError, match="size"):
        observe([drawn(rows_of_image, 8)], drawn(3, 8, seed=1), f, g)


def test_one_row_stands_for_all():
    image, x, f, g = drawn(1, 8), drawn(3, 8, seed=1), torch.empty(3, 8), torch.empty(3, 8)
    observe([image], x, f, g)
    assert torch.equal(f, image.expand(3, 8))
    assert torch.equal(g, image - x)
    active = torch.tensor([True, False, True])
    assert torch.equal(hold(x, image, active), torch.where(active[:, None], image, x))
