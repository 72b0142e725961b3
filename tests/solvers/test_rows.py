"""What solvers do with rows, in C and with PyTorch, against float64."""

import pytest
import torch

from opteq.solvers import rows


@pytest.fixture(params=["C", "PyTorch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(rows, "_library", lambda: None)
    elif rows._library() is None:
        pytest.skip("no C compiler, or another processor")
    return request.param


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


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
    changes, sizes = rows.observe(parts, x, f, g)
    image = torch.cat(parts, 1)
    assert torch.equal(f, image)
    assert torch.equal(g, image - x)
    for found, exact in ((changes, g.double().norm(dim=1)), (sizes, f.double().norm(dim=1))):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), exact, rtol=1e-6, atol=0)


def test_parts_and_rooms_may_lie_apart():
    wide = drawn(4, 50)
    parts, x = [wide[:, 3:20], wide[:, 20:41]], drawn(4, 60, seed=1)[:, :38]
    f, g = strided(4, 38), strided(4, 38)
    rows.observe(parts, x, f, g)
    assert torch.equal(f, wide[:, 3:41])
    assert torch.equal(g, wide[:, 3:41] - x)


def test_what_is_not_finite_stays_in_its_row():
    image, x = drawn(4, 3000), drawn(4, 3000, seed=1)
    image[1, 7], image[2, 2999] = torch.nan, torch.inf
    f, g = torch.empty(4, 3000), torch.empty(4, 3000)
    changes, sizes = rows.observe([image], x, f, g)
    assert [str(c) for c in changes[1:3]] == ["nan", "inf"]
    assert [str(s) for s in sizes[1:3]] == ["nan", "inf"]
    assert all(0 < number < 100 for number in (changes[0], changes[3], sizes[0], sizes[3]))


def test_a_sign_that_is_still_to_be_applied_is_applied():
    image, f, g = drawn(3, 8), torch.empty(3, 8), torch.empty(3, 8)
    rows.observe([torch._neg_view(image)], torch.zeros(3, 8), f, g)
    assert torch.equal(f, -image)


def test_columns_are_no_rows():
    # A matrix whose rows are not contiguous, which C does not read.
    image = drawn(30, 6).T
    f, g = torch.empty(6, 30), torch.empty(6, 30)
    rows.observe([image], torch.zeros(6, 30), f, g)
    assert torch.equal(f, image)


RIDGE = 10 * torch.finfo(torch.float32).eps


def minimising(differences, usable=None):
    """Weights that make `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` smallest under `Σ α_i = 1`, one sample, float64."""
    usable = torch.ones(len(differences), dtype=torch.bool) if usable is None else usable
    chosen = differences.double()[usable]
    sizes = chosen.norm(dim=1)
    directions = chosen / sizes[:, None]
    # In units of the sizes, so that no scale is lost.
    system = directions @ directions.mT + RIDGE * torch.eye(len(chosen), dtype=torch.float64)
    solution = torch.linalg.solve(system, 1 / sizes) / sizes
    weights = torch.zeros(len(differences), dtype=torch.float64)
    weights[usable] = solution / solution.sum()
    return weights


def history(batch, memory, n, seed=0, dtype=torch.float32):
    """Changes, candidates and the Gram matrix to which the newest, the last one, is still to be added."""
    changes, candidates = (drawn(batch, memory, n, seed=seed + i, dtype=dtype) for i in (0, 50))
    gram = changes.double() @ changes.double().mT
    gram[:, -1] = gram[:, :, -1] = torch.nan
    return changes, candidates, gram


@pytest.mark.parametrize(
    ("batch", "memory", "n"), [(0, 3, 5), (1, 1, 7), (1, 4, 5000), (6, 2, 2048), (9, 5, 40)]
)
def test_candidates_are_mixed_with_the_best_weights(batch, memory, n):
    changes, candidates, gram = history(batch, memory, n)
    found = rows.mix(changes, candidates, gram, memory, memory - 1)
    assert found.shape == (batch, n)
    torch.testing.assert_close(gram, changes.double() @ changes.double().mT, rtol=1e-5, atol=1e-4)
    for i in range(batch):
        weights = minimising(changes[i])
        torch.testing.assert_close(found[i].double(), weights @ candidates[i].double(), rtol=1e-4, atol=1e-4)


def test_a_history_that_is_not_full_is_mixed_as_far_as_it_goes():
    changes, candidates, gram = history(3, 4, 30)
    changes[:, 2:] = candidates[:, 2:] = torch.nan
    found = rows.mix(changes, candidates, gram, 2, 1)
    for i in range(3):
        weights = minimising(changes[i, :2])
        mixed = weights @ candidates[i, :2].double()
        torch.testing.assert_close(found[i].double(), mixed, rtol=1e-4, atol=1e-5)
    assert torch.isnan(gram[:, 3]).all()


def test_rows_use_what_they_may_and_restart_from_the_best_of_it():
    changes, candidates, gram = history(5, 4, 30)
    changes[3, 1] *= 1e-3  # the smallest of all, which the fourth row may not use
    changes[3, 2] *= 1e-2
    changes[4, 0] *= 1e-2
    gram[3:] = changes[3:].double() @ changes[3:].double().mT
    usable = torch.ones(5, 4, dtype=torch.bool)
    usable[1, :3] = usable[2, 0] = usable[3, 1] = False
    restarts = torch.tensor([False, False, False, True, True])
    found = rows.mix(changes, candidates, gram, 4, 3, usable, restarts)
    assert torch.equal(found[1], candidates[1, 3])
    assert torch.equal(found[3], candidates[3, 2])
    assert torch.equal(found[4], candidates[4, 0])
    for i in (0, 2):
        weights = minimising(changes[i], usable[i])
        torch.testing.assert_close(found[i].double(), weights @ candidates[i].double(), rtol=1e-4, atol=1e-4)


def test_what_falls_over_many_decades_is_mixed():
    # Residuals that fall by a factor of a thousand at each step.
    changes, candidates, _ = history(20, 4, 300)
    changes *= torch.tensor([1, 1e-3, 1e-6, 1e-9])[:, None]
    gram = changes.double() @ changes.double().mT
    found = rows.mix(changes, candidates, gram, 4, 3)
    for i in range(20):
        weights = minimising(changes[i])
        torch.testing.assert_close(found[i].double(), weights @ candidates[i].double(), rtol=1e-3, atol=1e-3)


def test_what_is_not_finite_leaves_other_rows_alone():
    changes, candidates, _ = history(3, 3, 8)
    changes[1, 0, 0] = torch.inf
    found = rows.mix(changes, candidates, changes.double() @ changes.double().mT, 3, 2)
    for i in (0, 2):
        weights = minimising(changes[i])
        torch.testing.assert_close(found[i].double(), weights @ candidates[i].double(), rtol=1e-4, atol=1e-4)


def test_changes_of_nothing_are_mixed():
    changes, candidates, gram = torch.zeros(2, 3, 8), drawn(2, 3, 8), torch.zeros(2, 3, 3).double()
    torch.testing.assert_close(rows.mix(changes, candidates, gram, 3, 2), candidates.mean(1))


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
    rows.descend(x, r, p, q, mp, rr, active)
    assert active.tolist() == [True, False, False, False, True]
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
    rows.turn(p, mp, r, mr, rr, goal, active)
    assert active.nonzero().flatten().tolist() == [going]
    torch.testing.assert_close(rr[[0, 4]], now[[0, 4]], rtol=1e-5, atol=0)
    assert torch.equal(rr[[1, 2, 3]], before[[1, 2, 3]])
    torch.testing.assert_close(p[going].double(), directions[0][going], rtol=1e-5, atol=1e-5)
    if metric:
        torch.testing.assert_close(mp[going].double(), directions[1][going], rtol=1e-5, atol=1e-5)
