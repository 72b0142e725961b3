"""Maps of kernels of an inner product, against plain loops and what the kernels are known for."""

import math
import warnings
from itertools import pairwise

import pytest
import torch

from opteq import (
    Anderson,
    Conv2d,
    Dense,
    EquilibriumLayer,
    KernelMap,
    Nesterov,
    OptEqUnit,
    Picard,
    PolynomialKernel,
    SigmoidKernel,
)
from opteq.errors import ConfigError, ShapeError
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.inner_product import InnerProductSimilarity
from tests.conformance.instances import seeded
from tests.conformance.reference import jacobian, random, spectral_norm

EXACT = Anderson(tol=1e-12, max_steps=2000)


def dense(kernel, gain: float = 1.0, **options) -> KernelMap:
    """A small map whose injections have norms of about `gain`."""
    module = seeded(lambda: KernelMap(Dense(4, 5), Dense(3, 4), kernel, **options))
    with torch.no_grad():
        module.injection.operator.weight.mul_(gain)
    return module


def similarity_of(module: KernelMap, x: torch.Tensor) -> InnerProductSimilarity:
    equation = module.bind(x)
    assert isinstance(equation, SimilarityEquation)
    assert isinstance(equation.similarity, InnerProductSimilarity)
    return equation.similarity


PRINTED = {
    "linear": ("linear", lambda t: 1.0),
    "polynomial": (PolynomialKernel(3, offset=0.0), lambda t: 3 * t**2),
    "sigmoid": ("sigmoid", lambda t: 1 - math.tanh(t) ** 2),
}


@pytest.mark.parametrize(("kernel", "slope"), PRINTED.values(), ids=PRINTED)
@pytest.mark.filterwarnings("ignore:.*degenerate")
@pytest.mark.spec("R6.1")
def test_the_printed_models(kernel, slope):
    module = dense(kernel, normalise=False, max_norm=None)
    x, y = random(4, 3), random(4, 4, seed=1)
    (W,) = module.W.weights
    for xi, yi, computed in zip(x, y, module.bind(x)(y), strict=True):
        c = module.injection(xi[None])[0]
        expected = torch.relu(W.mT @ W @ yi + slope((c @ yi).item()) * c)
        torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("R6.1", "R1.4")
def test_the_linear_kernel_is_optequs_model_in_the_state_y():
    # y = σ(A y + c) with A = WᵀW: the hidden state of a unit whose operator is Wᵀ.
    module = dense("linear", 3.0)
    unit = OptEqUnit(Dense(5, 4), module.injection.operator, bias=False, max_norm=None).double()
    x = random(6, 3)
    with torch.no_grad():
        (W,) = module.bind(x).similarity.W.tensors
        unit.W.weight.copy_(W.mT)
        unit.norm_checked = True
    y = EquilibriumLayer(module, EXACT)(x)
    z = EquilibriumLayer(unit, EXACT)(x)
    torch.testing.assert_close(z, y @ unit.W.weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["polynomial", "sigmoid"])
@pytest.mark.spec("R6.1")
def test_normalised_kernels_contract_whatever_the_injection(name):
    x = random(8, 3)
    for gain in (0.01, 1.0, 100.0, 1e4):
        module = dense(name, gain)
        with torch.no_grad():
            module.W.weight.mul_(10)
        equation = module.eval().bind(x).detach()
        bound = equation.contraction().value
        assert (bound <= 0.97**2 * (1 + 1e-6)).all()
        scale = module.injection(x).norm(dim=1, keepdim=True).detach()
        for seed in range(10):
            y = scale * random(8, 4, seed=seed)
            assert (spectral_norm(jacobian(equation, y)) <= bound).all()
        solution = EquilibriumLayer(module, Picard(tol=1e-10, max_steps=1000)).solve(x)
        assert solution.info.converged.all()


@pytest.mark.spec("R6.1")
def test_normalising_changes_nothing_where_the_printed_form_contracts():
    x = 0.05 * random(5, 3)
    plain, normalised = dense("sigmoid", normalise=False, max_norm=0.5), dense("sigmoid", max_norm=0.7)
    with torch.no_grad():
        plain.W.weight.mul_(0.2)
        normalised.W.weight.mul_(0.2)
    assert torch.equal(similarity_of(normalised, x).unit, torch.ones(5, dtype=torch.float64))
    y = random(5, 4)
    torch.testing.assert_close(normalised.bind(x)(y), plain.bind(x)(y), rtol=0, atol=0)


@pytest.mark.spec("R6.1")
def test_the_unit_of_inner_products():
    similarity = similarity_of(dense("sigmoid", 50.0, max_norm=0.8), random(5, 3))
    expected = 4 / 3**1.5 * similarity.injection.square().sum(1) / (0.5 * 0.8**2)
    assert (expected > 1).all()
    torch.testing.assert_close(similarity.unit, expected)


@pytest.mark.parametrize("degree", [3, 4, 6])
@pytest.mark.parametrize("gain", [0.3, 3.0, 300.0])
@pytest.mark.spec("R6.1")
def test_polynomials_of_any_degree_contract_in_a_ball_that_they_keep(degree, gain):
    module = dense(PolynomialKernel(degree), gain).eval()
    with torch.no_grad():
        module.W.weight.mul_(10)
    x = random(6, 3)
    equation = module.bind(x).detach()
    assert torch.isinf(equation.contraction().value).all()
    similarity = similarity_of(module, x)
    radius = (similarity.unit / similarity.injection.norm(dim=1)).detach()[:, None]
    for seed in range(30):
        direction = random(6, 4, seed=seed)
        y = radius * direction / direction.norm(dim=1, keepdim=True)
        assert (equation(y).norm(dim=1) <= radius[:, 0]).all()
        assert (equation.contraction(y).value <= 0.97**2 * (1 + 1e-6)).all()
    solution = EquilibriumLayer(module, Picard(tol=1e-10, max_steps=1000)).solve(x)
    assert solution.info.converged.all()
    assert (solution.value.norm(dim=1) <= radius[:, 0]).all()


@pytest.mark.spec("R6.1")
def test_the_printed_polynomial_is_reported_as_degenerate():
    with pytest.warns(RuntimeWarning, match=r"degree=2, offset=0.0\) is degenerate: y = 0 .* use an offset"):
        module = dense(PolynomialKernel(2, offset=0.0), 3.0, normalise=False)
    x = random(4, 3)
    assert not EquilibriumLayer(module)(x).any()
    # Zero is no minimiser, and the objective has none.
    equation = module.bind(x)
    c = module.injection(x).relu()
    steep = c.square().sum(1) > 2
    assert steep.any()
    energies = [
        equation.similarity.value(s * c) - 0.5 * (s * c).square().sum(1) for s in (0.0, 1.0, 10.0, 100.0)
    ]
    for below, above in pairwise(energies):
        assert (above > below)[steep].all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EquilibriumLayer(dense(PolynomialKernel(2, offset=0.1), 3.0))(x).any()


@pytest.mark.spec("R6.1")
def test_short_steps_reach_the_equilibria_of_a_stiff_sigmoid():
    # The Hessian reaches 0.77‖c‖², far above 1: plain iteration oscillates.
    module = dense("sigmoid", 30.0, normalise=False, max_norm=0.5)
    x = random(6, 3)
    assert (module.bind(x).contraction().value > 10).any()
    plain = EquilibriumLayer(module, Picard(tol=1e-8, max_steps=500), on_unconverged="count").solve(x)
    assert not plain.info.converged.all()
    steps = EquilibriumLayer(module, Nesterov(tol=1e-8, max_steps=20_000)).solve(x)
    assert steps.info.converged.all()
    y = steps.value
    assert ((module.bind(x)(y) - y).norm(dim=1) <= 1e-6 * y.norm(dim=1)).all()


def test_every_sample_has_its_own_step():
    module, x = dense("sigmoid", normalise=False), random(4, 3)
    x[1] *= 100
    y = random(4, 4, seed=1)

    def step(x, y):
        return module.bind(x).reformulate(gradient=True).function(y)

    alone = torch.cat([step(x[i : i + 1], y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(step(x, y), alone, rtol=1e-12, atol=1e-13)


def test_nesterov_is_refused_without_a_bound():
    with pytest.raises(ConfigError, match=r"Nesterov needs a bound .* use Anderson"):
        EquilibriumLayer(dense(PolynomialKernel(3)), Nesterov())(random(2, 3))


def test_a_cubic_without_injection_is_bounded():
    module = dense(PolynomialKernel(3))
    x = torch.zeros(2, 3, dtype=torch.float64)
    bound = module.bind(x).contraction().value
    assert torch.isfinite(bound).all()
    layer = EquilibriumLayer(module)
    layer(x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("kernel", ["linear", "polynomial", "sigmoid"])
def test_the_kernels_by_autograd(kernel):
    kernel = dense(kernel).kernel
    t = torch.linspace(-3, 3, 1201, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kernel.value(t).sum(), t)
    torch.testing.assert_close(kernel.slope(t), slope, rtol=1e-12, atol=1e-12)
    step = 1e-5
    difference = (kernel.slope(t + step) - kernel.slope(t - step)) / (2 * step)
    torch.testing.assert_close(kernel.curvature(t), difference, rtol=1e-8, atol=1e-8)
    curvature = kernel.curvature(t).abs()
    assert curvature.max().item() == pytest.approx(kernel.largest_curvature, rel=1e-4)
    assert curvature[t.abs() <= 1].max().item() == pytest.approx(kernel.unit_curvature, rel=1e-4)


def test_curvatures_of_higher_polynomials():
    assert PolynomialKernel(1).largest_curvature == 0
    assert PolynomialKernel(2, 0.5).largest_curvature == 2
    assert math.isinf(PolynomialKernel(3).largest_curvature)
    assert PolynomialKernel(4).unit_curvature == 4 * 3 * 2**2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KernelMap(Dense(4, 5), Dense(3, 5)), "produce the 4 channels of the state, .* got 5"),
        (
            lambda: KernelMap(Dense(4, 5), Dense(3, 4), "cubic"),
            r"one of linear, polynomial, sigmoid, or an object such as PolynomialKernel\(3\), got 'cubic'",
        ),
        (
            lambda: KernelMap(Dense(4, 5), Dense(3, 4), ["sigmoid"]),
            r"polynomial, sigmoid, or an object such as PolynomialKernel\(3\), got \['sigmoid'\]",
        ),
        (
            lambda: KernelMap(Dense(4, 5), Dense(3, 4), normalise=None),
            "`normalise` to be True or False, got None",
        ),
        (lambda: KernelMap(Dense(4, 5), Dense(3, 4), max_norm=0.0), "`max_norm` to be positive or None"),
        (lambda: KernelMap(torch.nn.Linear(4, 5), Dense(3, 4)), "opteq operator .* for `W`"),
        (lambda: PolynomialKernel(0), "`degree` of PolynomialKernel to be at least 1, got 0"),
        (lambda: PolynomialKernel(2, -1.0), "`offset` of PolynomialKernel to be at least 0"),
        (lambda: PolynomialKernel(2, math.inf), "`offset` of PolynomialKernel to be at least 0 and finite"),
        (lambda: KernelMap(Dense(3, 3), Dense(2, 3), SigmoidKernel), r"or an object such as .*, got <class"),
        (lambda: SigmoidKernel(offset=1.0), "SigmoidKernel has no option 'offset'; it has none"),
    ],
)
def test_options_out_of_range_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_injection_of_the_wrong_shape_is_named():
    module = KernelMap(Conv2d(4, 5), torch.nn.Linear(3, 4))
    with pytest.raises(ShapeError, match=r"`U x` of shape \(batch, 4, H, W\), got \(2, 4\)"):
        module.bind(torch.randn(2, 3))
