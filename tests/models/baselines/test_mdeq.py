"""MDEQ against its own formula, iterated 200 times and differentiated through."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opteq import Anderson, Broyden, Implicit, Unrolled, solve_log
from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.mdeq import MDEQ
from opteq.models.baselines.mdeqhead import MDEQHead
from tests.models.baselines.unrolling import assert_equals_unrolled

SOLVERS = {"anderson": Anderson(1e-13, 500, memory=8), "broyden": Broyden(1e-12, 500, memory=60)}


def small(widths=(2, 4, 6), seed=0, **options):
    torch.manual_seed(seed)
    body = MDEQ(3, widths, expansion=2, groups=2, **options)
    # Small last norms let the plain iteration contract, and biases start at zero, which hides them.
    for module in body.map.block.modules():
        if isinstance(module, nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.2, 0.5)
            nn.init.normal_(module.bias)
    for gain in body.map.block.gains:
        nn.init.uniform_(gain, 0.5, 1.5)
    return body


def norm(x, module):
    return F.group_norm(x, module.num_groups, module.weight, module.bias)


def formula(block, x, masks):
    """One step of MDEQ, written out, with its weight normalisation."""
    kernels = {}
    for name, gain in zip(block._normalised, block.gains, strict=True):
        v = block.get_parameter(name)
        kernels[name] = gain * v / v.square().sum((1, 2, 3), keepdim=True).sqrt()

    def step(z):
        inner = []
        for i, (branch, z_i) in enumerate(zip(block.branches, z, strict=True)):
            out = F.conv2d(z_i, kernels[f"branches.{i}.first.weight"], padding=1)
            out = F.conv2d(
                norm(out, branch.norms[0]).clamp(min=0), kernels[f"branches.{i}.second.weight"], padding=1
            )
            out = out * masks[i] + (x if i == 0 else 0)
            inner.append(norm((norm(out, branch.norms[1]) + z_i).clamp(min=0), branch.norms[2]))
        outer = []
        for i in range(len(z)):
            total = inner[i]
            for j in range(len(z)):
                if j == i:
                    continue
                modules, y = list(block.fusions[i].ways[j]), inner[j]
                if j > i:
                    y = norm(F.conv2d(y, modules[0].weight), modules[1])
                    y = y.repeat_interleave(2 ** (j - i), 2).repeat_interleave(2 ** (j - i), 3)
                else:
                    convolutions = [m for m in modules if isinstance(m, nn.Conv2d)]
                    norms = [m for m in modules if isinstance(m, nn.GroupNorm)]
                    assert len(convolutions) == len(norms) == i - j
                    for k, (convolution, normed) in enumerate(zip(convolutions, norms, strict=True)):
                        y = norm(F.conv2d(y, convolution.weight, stride=2, padding=1), normed)
                        y = y.clamp(min=0) if k < i - j - 1 else y
                total = total + y
            mixed = F.conv2d(total.clamp(min=0), kernels[f"fusions.{i}.mixer.weight"])
            outer.append(norm(mixed, block.fusions[i].norm))
        return tuple(outer)

    return step


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_equilibrium_and_gradients_are_those_of_200_unrolled_steps(solver, dropout):
    layer = small(solver=solver, gradient=Implicit(1e-13, 500), dropout=dropout).double()
    block, x = layer.map.block, torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    features = layer.map.injection(x)
    # The masks that the solve draws, from the same seed.
    torch.manual_seed(7)
    _, *masks = block.inputs(features)
    assert bool(masks) == (dropout > 0)
    step = formula(block, features, [m.detach() for m in masks] or [1.0] * 3)
    start = tuple(torch.zeros(2, n, 8 >> i, 8 >> i, dtype=torch.float64) for i, n in enumerate(block.widths))
    torch.manual_seed(7)
    assert_equals_unrolled(layer, step, start, x)


def test_a_mask_is_constant_in_a_solve_and_new_in_the_next():
    body, x = small(dropout=0.5, gradient=Unrolled(3)), torch.randn(4, 3, 8, 8)
    first, second = body(x), body(x)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    equation = body.map.bind(x)
    masks = equation.inputs[1:]
    assert [tuple(m.shape) for m in masks] == [(4, n, 1, 1) for n in (2, 4, 6)]
    assert all(set(m.unique().tolist()) <= {0.0, 2.0} for m in masks)
    state = equation(equation.initial())
    assert all(torch.equal(a, b) for a, b in zip(equation(state), equation(state), strict=True))
    body.eval()
    assert len(body.map.bind(x).inputs) == 1
    assert all(torch.equal(a, b) for a, b in zip(body(x), body(x), strict=True))


def test_weight_normalisation_keeps_the_function_at_the_start_and_forgets_lengths():
    torch.manual_seed(0)
    block = MDEQ(3, (8, 16)).map.block
    for name, weight in block.acting().items():
        torch.testing.assert_close(weight, block.get_parameter(name))
    before = block.acting()["branches.0.first.weight"]
    with torch.no_grad():
        block.branches[0].first.weight.mul_(3)
    torch.testing.assert_close(block.acting()["branches.0.first.weight"], before)


@pytest.mark.spec("R7.8")
def test_a_classifier_of_it_learns():
    torch.manual_seed(0)
    methods = {"solver": Broyden(1e-2, 18, memory=18), "gradient": Implicit(1e-2, 20)}
    body = MDEQ(4, (8, 16), expansion=2, dropout=0.1, **methods)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), body, MDEQHead(3, (8, 16), (2, 4), 16))
    x, labels = torch.randn(12, 3, 4, 4), torch.arange(12) % 3
    x += labels[:, None, None, None]
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    with solve_log(network) as log:
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), labels)
            loss.backward()
            assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert log.forward.samples == 30 * 12


def test_the_head_is_that_of_the_original_code():
    """By its parts: bottlenecks without affine norms, strided convolutions with bias, 1×1, linear."""
    head = MDEQHead(10, (32, 64, 128, 256))
    widths, hidden = (32, 64, 128, 256), (14, 28, 56, 112)
    shortcut = sum(w * 4 * n + 2 * 4 * n for w, n in zip(widths, hidden, strict=True))
    bottleneck = sum(w * n + 9 * n * n + 4 * n * n for w, n in zip(widths, hidden, strict=True))
    reducers = sum(9 * 4 * a * 4 * b + 3 * 4 * b for a, b in pairwise(hidden))
    expected = shortcut + bottleneck + reducers + 448 * 1680 + 3 * 1680 + 1680 * 10 + 10
    assert sum(p.numel() for p in head.parameters()) == expected
    z = tuple(torch.randn(2, n, 8 >> i, 8 >> i) for i, n in enumerate(widths))
    assert head(z).shape == (2, 10)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r"at least two `widths`, got \(8,\)"):
        MDEQ(3, (8,))
    with pytest.raises(ConfigError, match="`groups` to be a divisor of the channels 8, 12, got 8"):
        MDEQ(3, (8, 12))
    with pytest.raises(ConfigError, match=r"`dropout` to be at least 0 and below 1, got 1\.0"):
        MDEQ(3, (8, 16), dropout=1.0)
    with pytest.raises(ConfigError, match=r"per branch, got \[8, 16\] and \[4\]"):
        MDEQHead(3, (8, 16), (4,))
    with pytest.raises(ShapeError, match=r"that 4 divides, got \(6, 8\)"):
        MDEQ(3, (8, 8, 8))(torch.randn(1, 3, 6, 8))
