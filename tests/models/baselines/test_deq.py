"""The plain DEQ against its own formula, iterated and differentiated through."""

import pytest
import torch
import torch.nn.functional as F

from opteq import Anderson, Implicit
from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.deq import DEQ
from tests.models.baselines.unrolling import assert_equals_unrolled

EXACT = {"solver": Anderson(1e-13, 500, memory=8), "gradient": Implicit(1e-13, 500)}


def small(**options):
    torch.manual_seed(0)
    return DEQ(4, 6, groups=2, **options)


def norm(x, module):
    """Group norm by its definition."""
    parts = x.unflatten(1, (module.num_groups, -1))
    mean = parts.mean((2, 3, 4), keepdim=True)
    spread = parts.var((2, 3, 4), correction=0, keepdim=True)
    normed = ((parts - mean) / (spread + module.eps).sqrt()).flatten(1, 2)
    return module.weight[:, None, None] * normed + module.bias[:, None, None]


@pytest.mark.spec("R7.8")
def test_equilibrium_and_gradients_are_those_of_the_unrolled_formula():
    layer = small(**EXACT).double()
    block, x = layer.map.block, torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    for module in block.norms:
        torch.nn.init.uniform_(module.weight, 0.3, 0.6)
        torch.nn.init.normal_(module.bias)

    def step(z):
        hidden = norm(F.conv2d(z[0], block.first.weight, padding=1).clamp(min=0), block.norms[0])
        inner = norm(x + F.conv2d(hidden, block.second.weight, padding=1), block.norms[1])
        return (norm((z[0] + inner).clamp(min=0), block.norms[2]),)

    assert_equals_unrolled(layer, step, (torch.zeros_like(x),), x)


def test_the_contraction_at_a_state_is_the_norm_of_the_jacobian():
    layer, x = small().double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    equation = layer.map.bind(x).detach()
    state = torch.randn_like(x)
    jacobian = torch.autograd.functional.jacobian(equation, state)
    found = equation.contraction(state)
    assert found.kind == "estimate"
    for i, value in enumerate(found.value):
        own = jacobian[i, :, :, :, i].reshape(x[0].numel(), -1)
        torch.testing.assert_close(value, torch.linalg.matrix_norm(own, 2), rtol=1e-6, atol=0)
    assert equation.contraction().value.isinf().all()


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="`groups` to be a divisor of the channels 4, 6, got 4"):
        DEQ(4, 6, groups=4)
    with pytest.raises(ConfigError, match="`channels` to be a whole number of at least 1, got None"):
        DEQ()
    with pytest.raises(ShapeError, match=r"`x` of shape \(batch, channels, H, W\), got \(2, 4\)"):
        small()(torch.randn(2, 4))
