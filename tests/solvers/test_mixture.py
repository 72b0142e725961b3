"""A step of Anderson's method, in C and with PyTorch, against the minimisation behind it, in float64."""

import pytest
import torch

from opteq.native import rows
from opteq.solvers.anderson import Anderson

RIDGE = 10 * torch.finfo(torch.float32).eps


pytestmark = pytest.mark.usefixtures("way")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def minimising(changes):
    """Weights that make `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` smallest under `Σ α_i = 1`, one sample."""
    sizes = changes.double().norm(dim=1)
    directions = changes.double() / sizes[:, None]
    # In units of the sizes, so that no scale is lost.
    system = directions @ directions.mT + RIDGE * torch.eye(len(changes), dtype=torch.float64)
    solution = torch.linalg.solve(system, 1 / sizes) / sizes
    return solution / solution.sum()


def mixed(changes, candidates):
    """The combination of one sample's candidates with those weights."""
    return minimising(changes) @ candidates.double()


class Steps:
    """A stepper that is shown changes and images of our making, one after the other."""

    def __init__(self, batch, n, memory):
        self.rule = Anderson(memory=memory).start(torch.zeros(batch, n))

    def __call__(self, image, change):
        f, g = self.rule.rooms
        f.copy_(image)
        g.copy_(change)
        return self.rule(image - change, f, g, rows.norms(g, f))


@pytest.mark.parametrize(
    ("batch", "n", "memory"), [(0, 5, 3), (1, 7, 1), (1, 5000, 4), (6, 2048, 2), (9, 40, 5)]
)
def test_the_last_images_are_mixed_with_the_best_weights(batch, n, memory):
    steps = Steps(batch, n, memory)
    images, changes = [], []
    # Changes that shrink, so that no sample restarts, round the memory more than once.
    for k in range(2 * memory + 1):
        images.append(drawn(batch, n, seed=k))
        changes.append(0.5**k * drawn(batch, n, seed=50 + k))
        found = steps(images[-1], changes[-1])
        assert found.shape == (batch, n)
        for i in range(batch):
            last = [torch.stack([t[i] for t in kept[-memory:]]) for kept in (changes, images)]
            torch.testing.assert_close(found[i].double(), mixed(*last), rtol=1e-4, atol=1e-4)


def test_a_change_that_grows_threefold_sends_its_sample_back_to_the_best():
    steps = Steps(2, 30, 4)
    images, changes = drawn(5, 2, 30), drawn(5, 2, 30, seed=1)
    changes /= changes.norm(dim=2, keepdim=True)
    # The first sample grows from .5 to 1.6 at the fourth step, the second to 1.4.
    changes *= torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.7, 0.7], [1.6, 1.4], [0.4, 0.4]])[:, :, None]
    found = [steps(image, change) for image, change in zip(images, changes, strict=True)]
    assert torch.equal(found[3][0], images[1, 0])
    torch.testing.assert_close(
        found[3][1].double(), mixed(changes[:4, 1], images[:4, 1]), rtol=1e-4, atol=1e-5
    )
    # What went before the restart is forgotten, by the sample that restarted.
    torch.testing.assert_close(found[4][0], images[4, 0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        found[4][1].double(), mixed(changes[1:, 1], images[1:, 1]), rtol=1e-4, atol=1e-5
    )


def test_a_sample_that_makes_no_progress_restarts():
    memory = 2
    steps = Steps(2, 30, memory)
    images, changes = drawn(8, 2, 30), drawn(8, 2, 30, seed=1)
    changes /= changes.norm(dim=2, keepdim=True)
    # The look after steps 4 and 8: from the fifth step on the first sample is never below what it had.
    changes[:, 0] *= torch.tensor([1.0, 0.9, 0.8, 0.7, 0.9, 0.8, 0.75, 0.72])[:, None]
    changes[:, 1] *= torch.tensor([1.0, 0.9, 0.8, 0.7, 0.9, 0.8, 0.75, 0.6])[:, None]
    found = [steps(image, change) for image, change in zip(images, changes, strict=True)]
    assert torch.equal(found[7][0], images[7, 0])  # of the two in memory the smaller one
    torch.testing.assert_close(
        found[7][1].double(), mixed(changes[6:, 1], images[6:, 1]), rtol=1e-4, atol=1e-5
    )


def test_changes_that_fall_over_many_decades_are_mixed():
    steps = Steps(20, 300, 4)
    images, changes = drawn(4, 20, 300), drawn(4, 20, 300, seed=1)
    changes *= torch.tensor([1, 1e-3, 1e-6, 1e-9])[:, None, None]
    for image, change in zip(images, changes, strict=True):
        found = steps(image, change)
    for i in range(20):
        torch.testing.assert_close(
            found[i].double(), mixed(changes[:, i], images[:, i]), rtol=1e-3, atol=1e-3
        )


def test_what_is_not_finite_leaves_other_samples_alone():
    steps = Steps(3, 8, 3)
    images, changes = drawn(3, 3, 8), drawn(3, 3, 8, seed=1)
    changes /= changes.norm(dim=2, keepdim=True)
    changes[0, 1, 0] = torch.inf
    for image, change in zip(images, changes, strict=True):
        found = steps(image, change)
    for i in (0, 2):
        torch.testing.assert_close(
            found[i].double(), mixed(changes[:, i], images[:, i]), rtol=1e-4, atol=1e-4
        )


def test_the_same_change_twice_is_mixed():
    # An exact dependence, which the regularisation resolves.
    steps = Steps(2, 30, 3)
    images, changes = drawn(3, 2, 30), drawn(3, 2, 30, seed=1)
    changes /= changes.norm(dim=2, keepdim=True)
    changes[1] = changes[0]
    for image, change in zip(images, changes, strict=True):
        found = steps(image, change)
    for i in range(2):
        torch.testing.assert_close(
            found[i].double(), mixed(changes[:, i], images[:, i]), rtol=1e-4, atol=1e-4
        )


def test_changes_of_nothing_are_mixed():
    steps = Steps(2, 8, 3)
    images = drawn(3, 2, 8)
    for image in images:
        found = steps(image, torch.zeros(2, 8))
    torch.testing.assert_close(found, images.mean(0))
