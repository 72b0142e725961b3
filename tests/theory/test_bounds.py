import math

import pytest
import torch

from opteq import Dense, EquilibriumLayer, GaussianMap, Picard
from opteq.errors import ConfigError
from opteq.theory.bounds import (
    kernel_weight_bound,
    optequnit_generalization_bound,
    optequnit_similarity_bound,
)

EXAMPLE = {
    "margin": 0.5,
    "input_norm": 1.0,
    "norm": 0.5,
    "gram_norm": 0.25,
    "weights_norm": 2.0,
    "width": 3,
    "samples": 101,
    "confidence": 0.9,
}


@pytest.mark.spec("R6.7")
def test_the_generalization_bound_by_hand():
    # 2·(1/8)·2 + 2·(3/4)·(1/2)·2 + 9/16 = 0.5 + 1.5 + 0.5625
    bracket = 2.5625
    divergence = 16 * 3 * math.log(72) * bracket**2 * 4 / (0.25 * (81 / 256))
    expected = 4 * math.sqrt((divergence + math.log(6 * 101 * math.sqrt(101) / 0.1)) / 100)
    assert optequnit_generalization_bound(**EXAMPLE).value.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.spec("R6.7")
@pytest.mark.parametrize(
    ("name", "larger", "grows"),
    [
        ("margin", 0.6, False),
        ("input_norm", 1.5, True),
        ("norm", 0.6, True),
        ("gram_norm", 0.5, True),
        ("weights_norm", 3.0, True),
        ("width", 4, True),
        ("samples", 1000, False),
        ("confidence", 0.99, True),
    ],
)
def test_the_generalization_bound_is_monotone(name, larger, grows):
    before = optequnit_generalization_bound(**EXAMPLE).value
    after = optequnit_generalization_bound(**(EXAMPLE | {name: larger})).value
    assert (after > before) == grows


@pytest.mark.parametrize(
    "name", ["margin", "norm", "gram_norm", "input_norm", "weights_norm", "confidence", "width"]
)
def test_the_generalization_bound_refuses_what_the_proposition_does_not_admit(name):
    with pytest.raises(ConfigError, match=f"`{name}`"):
        optequnit_generalization_bound(**(EXAMPLE | {name: -1}))
    with pytest.raises(ConfigError, match=r"`norm` to be in \[0, 1\)"):
        optequnit_similarity_bound(torch.ones(1, 2), torch.ones(1, 2), 1.0, 3, 1.0)


@pytest.mark.spec("R6.7")
@pytest.mark.parametrize("angle", [0.0, 1.0, math.pi])
def test_the_similarity_of_outputs_by_sampling(angle):
    torch.manual_seed(0)
    width, variance, draws = 12, 0.3, 20_000
    W = torch.randn(8, width, dtype=torch.float64)
    W *= 0.6 / torch.linalg.matrix_norm(W, 2)
    x1 = torch.tensor([[1.5, 0.0]], dtype=torch.float64)
    x2 = 2 * torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    U = variance**0.5 * torch.randn(draws, width, 2, dtype=torch.float64)

    def equilibrium(x):
        c = U @ x[0]
        y = torch.zeros_like(c)
        for _ in range(60):
            y = (y @ W.mT @ W + c).relu()
        return y

    similarity = (equilibrium(x1) * equilibrium(x2)).sum(1)
    error = 4 * similarity.std() / draws**0.5
    bound = optequnit_similarity_bound(x1, x2, variance, width, 0.6).value
    assert similarity.mean() + error <= bound
    if angle == 0:
        assert similarity.mean() > 0.3 * bound
    if angle == math.pi:
        assert similarity.mean() - error > 0  # where the printed bound says 0


@pytest.mark.spec("R6.7")
def test_the_weights_of_unlike_inputs():
    torch.manual_seed(0)
    unit = GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.4, bias=False, max_norm=0.9).double()
    unit.W.weight.data *= 10
    layer = EquilibriumLayer(unit, Picard(tol=1e-10, max_steps=1000))
    x1, x2 = torch.randn(2, 500, 3, dtype=torch.float64)
    products, states = [], []
    for x in (x1, x2):
        similarity = unit.bind(x).similarity
        y = layer(x)
        products.append(similarity.attention(y)[:, 0])
        states.append(y.norm(dim=1))
    smallest = torch.linalg.svdvals(unit.injection.operator.weight)[-1].item()
    largest = torch.stack(states).max().item()
    bound = kernel_weight_bound(x1, x2, 0.4, smallest, 0.9, largest).value
    product = (products[0] * products[1]).detach()
    assert (product <= bound).all()
    assert (product > 0.2 * bound).any()
