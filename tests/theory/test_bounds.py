import math
import re

import pytest
import torch

from opteq import Dense, EquilibriumLayer, GaussianMap, Picard
from opteq.errors import ConfigError
from opteq.theory.bounds import (
    geq_generalization_bound,
    kernel_weight_bound,
    optequnit_generalization_bound,
    optequnit_similarity_bound,
    published_lipschitz_geq,
    published_lipschitz_optequnit,
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


GAUSSIAN = EXAMPLE | {"largest_weight": 0.8}


@pytest.mark.spec("R6.7")
def test_the_generalization_bound_of_geq_by_hand():
    # r = 0.8; 2·0.8·(1/16)·2 + 2·(2·0.5·0.8 + 1)·0.8·0.5·2 + 0.64 = 0.2 + 2.88 + 0.64
    divergence = 16 * 3 * math.log(72) * 3.72**2 * 4 / (0.25 * 0.8**4)
    expected = 4 * math.sqrt((divergence + math.log(6 * 101 * math.sqrt(101) / 0.1)) / 100)
    bound = geq_generalization_bound(**GAUSSIAN)
    assert bound.value.item() == pytest.approx(expected, rel=1e-12)
    assert any("does not change" in text for text in bound.assumptions)


@pytest.mark.spec("R6.7")
@pytest.mark.parametrize(
    ("name", "larger", "grows"),
    [
        ("margin", 0.6, False),
        ("input_norm", 1.5, True),
        ("norm", 0.6, True),
        ("gram_norm", 0.5, True),
        ("largest_weight", 0.9, True),
        ("weights_norm", 3.0, True),
        ("width", 4, True),
        ("samples", 1000, False),
        ("confidence", 0.99, True),
    ],
)
def test_the_generalization_bound_of_geq_is_monotone(name, larger, grows):
    before = geq_generalization_bound(**GAUSSIAN).value
    after = geq_generalization_bound(**(GAUSSIAN | {name: larger})).value
    assert (after > before) == grows


@pytest.mark.spec("R6.7")
def test_geq_is_bounded_tighter_under_the_conditions_of_remark_1():
    sizes = EXAMPLE | {"norm": 0.97, "gram_norm": 0.94}
    tight = geq_generalization_bound(**sizes, largest_weight=0.5).value
    assert tight < optequnit_generalization_bound(**sizes).value


LIPSCHITZ = {"largest_weight": 0.4, "norm": 0.5, "gamma": 0.36, "size": 2.0}
INPUTS = {"x1": torch.ones(1, 2), "x2": torch.ones(1, 2)}
SIMILARITY = INPUTS | {"variance": 1.0, "width": 3, "norm": 0.5}
WEIGHTS = INPUTS | {"gamma": 0.5, "smallest": 1.0, "norm": 0.5, "state_norm": 1.0}
BOUNDS = {
    optequnit_generalization_bound: EXAMPLE,
    geq_generalization_bound: GAUSSIAN,
    published_lipschitz_optequnit: {"norm": 0.5},
    published_lipschitz_geq: LIPSCHITZ,
    optequnit_similarity_bound: SIMILARITY,
    kernel_weight_bound: WEIGHTS,
}
# What is refused, in which words, and what is still admitted.
RANGES = {
    "margin": ([0.0, -1.0], "positive", [1e-3]),
    "input_norm": ([-1.0], "at least 0", [0.0]),
    "gram_norm": ([-0.1, 1.0], "in [0, 1)", [0.0, 0.99]),
    "weights_norm": ([-1.0], "at least 0", [0.0]),
    "width": ([0, -1], "at least 1", [1]),
    "samples": ([1, 0], "at least 2", [2]),
    "confidence": ([0.0, 1.0], "in (0, 1)", [0.01, 0.99]),
    "gamma": ([0.0, -0.5], "positive", [1e-3]),
    "size": ([-1.0], "at least 0", [0.0]),
    "variance": ([-1.0], "at least 0", [0.0]),
    "smallest": ([-1.0], "at least 0", [0.0]),
    "state_norm": ([-1.0], "at least 0", [0.0]),
}
OPEN_NORM = ([0.0, 1.0], "in (0, 1)", [0.01, 0.99])
NORM = ([-0.1, 1.0], "in [0, 1)", [0.0])
OWN_RANGES = {
    (optequnit_generalization_bound, "norm"): OPEN_NORM,
    (geq_generalization_bound, "norm"): OPEN_NORM,
    (geq_generalization_bound, "largest_weight"): ([0.0, 1.1, -1], "in (0, 1]", [1.0]),
    (published_lipschitz_optequnit, "norm"): NORM,
    (published_lipschitz_geq, "norm"): NORM,
    (published_lipschitz_geq, "largest_weight"): ([-0.1, 1.1], "in [0, 1]", [0.0, 1.0]),
    (optequnit_similarity_bound, "norm"): NORM,
    (kernel_weight_bound, "norm"): ([-1.0], "at least 0", [0.0]),
}


@pytest.mark.spec("R6.7")
@pytest.mark.parametrize(
    ("bound", "name"),
    [(bound, name) for bound, given in BOUNDS.items() for name in given if name not in INPUTS],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_numbers_that_a_proposition_does_not_admit_are_refused_and_no_others(bound, name):
    refused, expected, admitted = OWN_RANGES.get((bound, name)) or RANGES[name]
    for value in refused:
        with pytest.raises(
            ConfigError, match=re.escape(f"Expected `{name}` to be {expected}, got {value!r}.")
        ):
            bound(**(BOUNDS[bound] | {name: value}))
    for value in admitted:
        certificate = bound(**(BOUNDS[bound] | {name: value}))
        assert certificate.value.isfinite().all()
        assert certificate.kind == "bound"
        assert any("The activation is ReLU" in text for text in certificate.assumptions)


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


@pytest.mark.spec("R6.7")
def test_the_printed_bound_on_the_weights_of_geq_fails():
    # W = 0 and x_2 = -x_1: the statement's D e^{-γσ²‖x_1-x_2‖²}, D = 1, lies below β_1β_2; a fourth of the
    # exponent, as its proof has it, does not.
    gamma, x1 = 0.4, torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    unit = GaussianMap(Dense(2, 2), Dense(2, 2), gamma=gamma, bias=False).double()
    with torch.no_grad():
        unit.W.weight.zero_()
        unit.injection.operator.weight.copy_(torch.eye(2))
    weights = [unit.bind(x).similarity.attention(torch.zeros(1, 2).double()) for x in (x1, -x1)]
    product = weights[0] * weights[1]
    printed = torch.exp(-gamma * (2 * x1).square().sum())
    assert product > 2 * printed
    assert (product <= kernel_weight_bound(x1, -x1, gamma, 1.0, 0.0, 1.0).value).all()


@pytest.mark.spec("R6.7")
def test_proposition_3_by_hand():
    assert published_lipschitz_optequnit(0.5).value.item() == pytest.approx(0.5 / 0.75, rel=1e-12)
    # 0.4·0.25 + 0.6·2·0.125 = 0.25
    bound = published_lipschitz_geq(0.4, 0.5, 0.36, 2.0)
    assert bound.value.item() == pytest.approx(1 / 3, rel=1e-12)
    assert any("γ is fixed" in text for text in bound.assumptions)


def test_proposition_3_ends_where_its_rate_reaches_1():
    with pytest.raises(ConfigError, match=r"below 1, got 3\.89; use `equilibrium_lipschitz`"):
        published_lipschitz_geq(1.0, 0.99, 1.0, 3.0)
    # ½·½² + √γ·B·½³ is 1 at √γB = 7, all of it exact.
    with pytest.raises(ConfigError, match=r"below 1, got 1; use"):
        published_lipschitz_geq(0.5, 0.5, 49.0, 1.0)
    assert published_lipschitz_geq(0.5, 0.5, 36.0, 1.0).value.item() == pytest.approx(7, rel=1e-12)


@pytest.mark.spec("R6.7")
def test_proposition_4_by_hand():
    # ‖x_1‖ = 5, ‖x_2‖ = 2: 3·0.3·5·2/(2·0.75²); in float64 whatever the inputs are.
    x1, x2 = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    value = optequnit_similarity_bound(x1, x2, 0.3, 3, 0.5).value
    assert value.tolist() == pytest.approx([8.0], rel=1e-12)
    # ‖x_1 - x_2‖² = 13: e^{0.4·((2·0.5)² - 0.6²·13/4)}
    value = kernel_weight_bound(x1, x2, 0.4, 0.6, 0.5, 2.0).value
    assert value.tolist() == pytest.approx([math.exp(0.4 * (1 - 0.36 * 13 / 4))], rel=1e-12)
