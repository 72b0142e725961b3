"""Monotone DEQ against dense matrices, and its two splittings against each other."""

import pytest
import torch
import torch.nn.functional as F

from opteq import Anderson, EquilibriumLayer, Implicit, Picard, Unrolled
from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.monotone import ForwardBackward, PeacemanRachford
from opteq.models.baselines.monotonebody import Monotone

SHAPES = {"one-tier": ((3,), (4, 6)), "two-tiers": ((2, 3), (4, 2)), "three-tiers": ((2, 3, 4), (8, 4))}
SPLITTINGS = {"forward-backward": ForwardBackward, "peaceman-rachford": PeacemanRachford}
EXACT = Anderson(1e-13, 500, memory=8), Implicit(1e-13, 500)


def made(kind, hidden, seed=0, channels=2, m=0.5, step=0.4):
    """A map with large and negative gains, which must not make it less monotone."""
    torch.manual_seed(seed)
    network = kind(channels, hidden, m, step).double()
    for parts, sign in ((network.A, -1.0), (network.B, 1.5), (network.D, -1.2)):
        for number, kernel in enumerate(parts):
            kernel.gain.data.fill_(sign * (1 + 0.3 * number))
    torch.nn.init.normal_(network.injection.bias, std=0.5)
    return network


def same_weights(kind, other, **options):
    hidden = [kernel.weight.shape[0] for kernel in other.A]
    twin = made(kind, hidden, channels=other.injection.operator.in_channels, m=other.m, **options)
    twin.load_state_dict(other.state_dict())
    return twin


def matrix(part, shape, pads, **options):
    """The matrix of a convolution of images, the given zeros around them, in the graph of its kernel."""
    n = torch.Size(shape).numel()
    images = F.pad(torch.eye(n, dtype=torch.float64).view(n, *shape), pads)
    kernel = part.gain * part.weight / part.weight.square().sum().sqrt()
    return F.conv2d(images, kernel, **options).flatten(1).mT


def widened(rows, shape):
    """Rows of images, with one row and one column of zeros behind each."""
    return F.pad(rows.mT.unflatten(1, shape), (0, 1, 0, 1)).flatten(1).mT


def dense(network, sides):
    """`I - W` on the images within the borders, from ordinary zero-padded convolutions."""
    hidden = [part.weight.shape[0] for part in network.A]
    sizes = [(n, sides[0] >> i, sides[1] >> i) for i, n in enumerate(hidden)]
    lengths = [torch.Size(size).numel() for size in sizes]
    before = None
    blocks = [[torch.zeros(a, b, dtype=torch.float64) for b in lengths] for a in lengths]
    for i, (n, h, w) in enumerate(sizes):
        # Every output that a 3×3 kernel reaches counts in AᵀA, those beyond the image too.
        A = matrix(network.A[i], sizes[i], (2, 2, 2, 2))
        B = matrix(network.B[i], sizes[i], (1, 1, 1, 1))
        blocks[i][i] = network.m * torch.eye(lengths[i], dtype=torch.float64) + A.mT @ A - B + B.mT
        if i:
            blocks[i][i - 1] = 2 * A.mT @ before
        if i < len(network.D):
            # One row and column of outputs before the image; the next tier has another pair behind.
            D = matrix(network.D[i], (n, h, w), (2, 1, 2, 1), stride=2)
            blocks[i][i] = blocks[i][i] + D.mT @ D
            before = widened(D, (hidden[i + 1], h // 2 + 1, w // 2 + 1))
    return torch.cat([torch.cat(row, 1) for row in blocks]), lengths


def injected(network, x):
    operator = network.injection.operator
    return F.conv2d(x, operator.weight, network.injection.bias, padding=1)


def solution(system, c):
    """`z = relu(z - system z + c)` for one sample, to the last digit, in the graph of both."""
    with torch.no_grad():
        step = 1e-1 / torch.linalg.matrix_norm(system, 2)
        z, least = torch.zeros_like(c), torch.inf
        for _ in range(20_000):
            following = F.relu(z - step * (system @ z - c))
            least = (following - z).abs().max()
            z = following
            if least < 1e-14:
                break
        assert least < 1e-12
        active = z > 0
        # Complementarity: nothing that is at zero would grow.
        assert (c - system @ z)[~active].max() < 1e-9
    found = torch.linalg.solve(system[active][:, active], c[active])
    assert (found > 0).all()
    return torch.zeros_like(c).masked_scatter(active, found)


def dense_equilibrium(network, x):
    """The tiers of the equilibrium side by side, and the last one, from dense linear algebra."""
    system, lengths = dense(network, x.shape[2:])
    c = F.pad(injected(network, x).flatten(1), (0, sum(lengths[1:])))
    z = torch.stack([solution(system, row) for row in c])
    h, w = (n >> (len(lengths) - 1) for n in x.shape[2:])
    return z, z[:, -lengths[-1] :].view(len(x), -1, h, w)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize("kind", SPLITTINGS.values(), ids=SPLITTINGS)
@pytest.mark.parametrize(("hidden", "sides"), SHAPES.values(), ids=SHAPES)
def test_equilibria_and_gradients_are_those_of_dense_linear_algebra(hidden, sides, kind):
    network = made(kind, hidden)
    x = torch.randn(2, 2, *sides, dtype=torch.float64, requires_grad=True)
    tiers, expected = dense_equilibrium(network, x)
    solved = EquilibriumLayer(network, *EXACT, on_unconverged="raise").solve(x)
    torch.testing.assert_close(solved.value, expected, rtol=0, atol=1e-11)
    # Both splittings have the equilibrium within the border of what is positive in their states.
    within = [F.relu(t[..., 1:-1, 1:-1]).flatten(1) for t in solved.state]
    torch.testing.assert_close(torch.cat(within, 1), tiers, rtol=0, atol=1e-11)
    assert 0 < (expected > 0).double().mean() < 1

    weight = torch.randn_like(expected)
    targets = (x, *network.parameters())
    wanted = torch.autograd.grad((expected * weight).sum(), targets)
    found = torch.autograd.grad((solved.value * weight).sum(), targets)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert all(g.norm() > 0 for g in wanted)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize(("hidden", "sides"), SHAPES.values(), ids=SHAPES)
def test_the_plain_splittings_reach_the_same_equilibrium_and_gradients(hidden, sides):
    first = made(ForwardBackward, hidden, m=1.0, step=0.08)
    second = same_weights(PeacemanRachford, first, step=1.5)
    x = torch.randn(3, 2, *sides, dtype=torch.float64)
    values, gradients = [], []
    for network in (first, second):
        layer = EquilibriumLayer(network, Picard(1e-11, 2000), Implicit(1e-11, 500), on_unconverged="raise")
        z = layer(x)
        values.append(z)
        gradients.append(torch.autograd.grad(z.square().sum(), tuple(network.parameters())))
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize("kind", SPLITTINGS.values(), ids=SPLITTINGS)
def test_implicit_gradients_are_those_of_the_unrolled_iteration(kind):
    network = made(kind, (2, 3), m=2.0, step=0.15)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    targets = (x, *network.parameters())
    solved, unrolled = EquilibriumLayer(network, *EXACT)(x), EquilibriumLayer(network, None, Unrolled(200))(x)
    torch.testing.assert_close(solved, unrolled, rtol=0, atol=1e-10)
    pairs = zip(*(torch.autograd.grad(z.square().sum(), targets) for z in (solved, unrolled)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize(("hidden", "sides"), SHAPES.values(), ids=SHAPES)
def test_it_is_as_monotone_as_it_is_told(hidden, sides):
    system, _ = dense(made(ForwardBackward, hidden, m=0.3), sides)
    assert torch.linalg.eigvalsh((system + system.mT) / 2)[0] >= 0.3 - 1e-12


@pytest.mark.parametrize("kind", SPLITTINGS.values(), ids=SPLITTINGS)
@pytest.mark.parametrize(("hidden", "sides"), SHAPES.values(), ids=SHAPES)
def test_the_contraction_bounds_the_map_and_the_distance(hidden, sides, kind):
    network = made(kind, hidden, step=0.01)
    x = torch.randn(2, 2, *sides, dtype=torch.float64)
    equation = network.bind(x)
    bound = equation.contraction()
    assert bound.kind == "bound"
    assert (bound.value < 1).all()
    start = equation.initial()
    for seed in range(5):
        torch.manual_seed(seed)
        a, b = (tuple(torch.randn_like(t) for t in start) for _ in range(2))
        moved = zip(equation(a), equation(b), strict=True)
        after = sum((s - t).square().sum((1, 2, 3)) for s, t in moved)
        apart = sum((s - t).square().sum((1, 2, 3)) for s, t in zip(a, b, strict=True))
        assert (after.sqrt() <= bound.value * apart.sqrt()).all()
    true = (equation.readout(a) - dense_equilibrium(network, x)[1]).flatten(1).norm(dim=1)
    assert (true <= equation.distance_bound(a).value).all()


def test_forward_backward_promises_nothing_for_a_large_step():
    equation = made(ForwardBackward, (3,), step=2.0).bind(torch.randn(1, 2, 4, 4, dtype=torch.float64))
    assert (equation.contraction().value > 1).all()
    assert equation.distance_bound(equation.initial()).value.isinf().all()


def test_it_works_in_single_precision_and_samples_do_not_see_each_other():
    torch.manual_seed(0)
    body, x = Monotone(3, (8, 4)), torch.randn(4, 3, 8, 8)
    z = body(x)
    assert z.shape == (4, 4, 4, 4)
    z.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in body.parameters())
    torch.testing.assert_close(torch.cat([body(image[None]) for image in x]), z, rtol=0, atol=2e-3)
    assert body(torch.randn(0, 3, 8, 8)).shape == (0, 4, 4, 4)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="one of forward-backward, peaceman-rachford, got 'newton'"):
        Monotone(3, splitting="newton")
    with pytest.raises(ConfigError, match=r"at least one number of `hidden` channels, got \[\]"):
        Monotone(3, [])
    with pytest.raises(ConfigError, match="`m` to be positive"):
        Monotone(3, m=0.0)
    with pytest.raises(ConfigError, match="`step` to be positive"):
        Monotone(3, step=-1.0)
    with pytest.raises(ConfigError, match="`channels` to be a whole number of at least 1, got None"):
        Monotone()
    with pytest.raises(ShapeError, match=r"that 4 divides, got \(6, 8\)"):
        Monotone(3, (4, 4, 4))(torch.randn(1, 3, 6, 8))
