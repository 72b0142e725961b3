"""Maps of the user's own similarities, against maps whose derivatives are written out."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from opteq import (
    Anderson,
    Conv2d,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    Nesterov,
    Picard,
    SimilarityMap,
    Unrolled,
)
from opteq.errors import ConfigError, ShapeError
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.autograd import AutogradSimilarity
from opteq.theory.certificates import certify
from tests.conformance.instances import ESTIMATED_MAPS, Student, seeded
from tests.conformance.reference import jacobian, random, spectral_norm

GAMMA = 0.5


class GaussianByHand(nn.Module):
    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.W = operator

    def forward(self, y: Tensor, c: Tensor) -> Tensor:
        return torch.exp(-GAMMA * (c - self.W(y)).square().flatten(1).sum(1)) / (2 * GAMMA)


def gaussian_pair(W, U, channels: int) -> tuple[SimilarityMap, GaussianMap]:
    """The same model by autograd and by formulas, with the same weights."""
    torch.manual_seed(0)
    known = GaussianMap(W, U, gamma=GAMMA, bias=False, max_norm=None).double()
    own = SimilarityMap(GaussianByHand(copy.deepcopy(known.W)), copy.deepcopy(U), channels).double()
    return own, known


PAIRS = {
    "dense": (lambda: gaussian_pair(Dense(4, 5), Dense(3, 5), 4), (3,)),
    "conv": (lambda: gaussian_pair(Conv2d(2, 3), Conv2d(1, 3), 2), (1, 3, 4)),
}


@pytest.mark.parametrize(("make", "shape"), PAIRS.values(), ids=PAIRS)
@pytest.mark.spec("R6.1")
def test_the_gaussian_similarity_brought_along_is_the_gaussian_map(make, shape):
    torch.manual_seed(0)
    own, known = make()
    x, cotangent = random(3, *shape), None
    results = []
    for module in (own, known):
        layer = EquilibriumLayer(module, Anderson(tol=1e-12, max_steps=500), Implicit(1e-12, 500))
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        cotangent = random(*y.shape, seed=1)
        gradients = torch.autograd.grad((cotangent * y).sum(), [inputs, *module.parameters()])
        energy = layer.bind(x).objective(y)
        results.append([y, energy, gradients[0], *sorted(gradients[1:], key=lambda g: g.shape)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_a_function_will_do():
    def similarity(y, c):
        return (y * c).sum(1) - 0.03 * y.pow(4).sum(1)

    module = SimilarityMap(similarity, Dense(3, 4), 4).double()
    x = random(5, 3)
    y = EquilibriumLayer(module, Picard(tol=1e-12, max_steps=500))(x)
    torch.testing.assert_close(y, torch.relu(module.U(x) - 0.12 * y**3), rtol=1e-9, atol=1e-10)


def test_a_linear_function_has_no_curvature():
    module = SimilarityMap(lambda y, c: (y * c).sum(1), Dense(3, 4), 4).double()
    x = random(5, 3).requires_grad_()
    y = EquilibriumLayer(module)(x)
    torch.testing.assert_close(y, module.U(x).relu())
    expected = torch.autograd.grad(module.U(x).relu().square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), expected)
    constant = SimilarityMap(lambda y, c: y.sum(1), Dense(3, 4), 4).double()
    assert not constant.check_contraction(x.detach()).value.any()
    assert torch.equal(EquilibriumLayer(constant)(x), torch.ones(5, 4).double())


def similarity_of(module: SimilarityMap, x: Tensor) -> AutogradSimilarity:
    equation = module.bind(x)
    assert isinstance(equation, SimilarityEquation)
    assert isinstance(equation.similarity, AutogradSimilarity)
    return equation.similarity


@pytest.mark.spec("R6.1")
def test_the_estimate_of_the_hessian_is_that_of_a_dense_one():
    own, _ = gaussian_pair(Conv2d(2, 3), Conv2d(1, 3), 2)
    similarity = similarity_of(own, random(4, 1, 3, 4))
    y = 0.5 * random(4, 2, 3, 4, seed=1)
    y[2] = 10.0  # where nothing is left of the Gaussian
    values = torch.linalg.eigvalsh(jacobian(similarity.gradient, y))
    smallest, largest = similarity.hessian_range(y)
    torch.testing.assert_close(smallest, values[:, 0], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(largest, values[:, -1], rtol=1e-6, atol=1e-12)
    bound = similarity.hessian_bound(y)
    assert bound.kind == "estimate"
    torch.testing.assert_close(bound.value, torch.maximum(-smallest, largest))
    everywhere = similarity.hessian_bound()
    assert everywhere.kind == "estimate"
    assert any("elsewhere" in text for text in everywhere.assumptions)
    start = spectral_norm(jacobian(similarity.gradient, similarity.initial()))
    assert (everywhere.value >= start * (1 - 1e-6)).all()


@pytest.mark.spec("R6.1")
def test_a_similarity_that_does_not_contract_is_reported():
    module = SimilarityMap(lambda y, c: (y * c).sum(1) + 0.85 * y.square().sum(1), Dense(3, 4), 4).double()
    message = (
        r"no contraction at 2 of 2 inputs: L_σ‖∇²S‖ is about 1.7 for sample \d\..* divide S by more than that"
    )
    with pytest.warns(RuntimeWarning, match=message):
        module.bind(random(2, 3))
    with pytest.warns(RuntimeWarning, match=message):
        found = module.check_contraction(random(2, 3))
    assert found.kind == "estimate"
    torch.testing.assert_close(found.value, torch.full((2,), 1.7, dtype=torch.float64))


@pytest.mark.spec("R6.1")
def test_only_the_inputs_that_do_not_contract_are_counted():
    # The curvature is that of the input: 3‖c‖² along c.
    module = SimilarityMap(
        lambda y, c: c.sum(1) * y.sum(1) / 9 + 1.5 * (y * c).sum(1).square(), nn.Identity(), 3
    ).double()
    x = torch.tensor([[0.1, 0, 0], [0, 1.0, 0], [0, 0, 0.2]], dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="at 1 of 3 inputs: .* about 3 for sample 1"):
        found = module.check_contraction(x)
    torch.testing.assert_close(found.value, 3 * x.square().sum(1))


@pytest.mark.spec("R6.1")
def test_a_layer_can_be_certified_by_estimate():
    case = ESTIMATED_MAPS["own"]
    certificate = certify(EquilibriumLayer(case.map().float(), Anderson(tol=1e-3)), case.inputs().float())
    assert certificate.contraction.kind == certificate.distance.kind == "estimate"
    assert (certificate.distance_to_reference.value <= certificate.distance.value).all()


def test_unrolled_can_be_differentiated_twice():
    module = ESTIMATED_MAPS["own"].map()
    layer = EquilibriumLayer(module, gradient=Unrolled(4), on_unconverged="count")
    x = ESTIMATED_MAPS["own"].inputs(batch=1).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, x, atol=1e-6, rtol=1e-4, fast_mode=True)


def test_training_moves_the_parameters_of_the_similarity():
    module = seeded(lambda: SimilarityMap(Student(), Dense(3, 5), 4))
    layer, x = EquilibriumLayer(module), random(8, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    before = module.similarity.W.weight.detach().clone()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x).sum(1) - 0.2).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.allclose(before, module.similarity.W.weight)


def test_pickles_and_copies():
    module = ESTIMATED_MAPS["own"].map()
    x = ESTIMATED_MAPS["own"].inputs()
    expected = EquilibriumLayer(module)(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(EquilibriumLayer(other)(x), expected, rtol=0, atol=0)


OUTSIDE = nn.Parameter(torch.ones(()))
WRONG = {
    "scalar": (lambda y, c: (y * c).sum(), ShapeError, r"shape \(3,\), got \(\)"),
    "not reduced": (lambda y, c: y * c, ShapeError, r"shape \(3,\), got \(3, 4\)"),
    "no tensor": (lambda y, c: 1.0, ShapeError, r"shape \(3,\), got float"),
    "detached": (lambda y, c: (y * c).sum(1).detach(), ConfigError, "differentiable in its first argument"),
    "outside": (lambda y, c: OUTSIDE * (y * c).sum(1), ConfigError, "trainable tensors .* make it an nn.Mod"),
    "coupled": (lambda y, c: (y - y.mean(0)).square().sum(1), ConfigError, "one sample depends on others"),
    "coupled by c": (lambda y, c: (y * c.mean(0)).sum(1), ConfigError, "one sample depends on others"),
    "coupled onwards": (
        lambda y, c: y[:, 0] * torch.cat([c[:1, 0], y[:-1, 0]]),
        ConfigError,
        "one sample depends on others",
    ),
    "coupled backwards": (
        lambda y, c: y[:, 0] * torch.cat([y[1:, 0], c[-1:, 0]]),
        ConfigError,
        "one sample depends on others",
    ),
    "coupled behind autograd's back": (
        lambda y, c: (y * c / y.detach().std(0)).sum(1),
        ConfigError,
        "one sample depends on others",
    ),
    "random": (lambda y, c: (y * torch.randn_like(c)).sum(1), ConfigError, "another value .* is random"),
    "in place": (lambda y, c: (y.mul_(0.5) * c).sum(1), ConfigError, "changes its arguments in place"),
    "in place, once": (lambda y, c: (y.square() * c.abs_()).sum(1), ConfigError, "arguments in place"),
    "complex": (lambda y, c: (y * c).sum(1) + 0j, ShapeError, "one real number .* of torch.complex64"),
    "nan": (lambda y, c: math.nan * (y * c).sum(1), ConfigError, "not finite at y = 0.* for 3 of 3 inputs"),
    "unbounded": (lambda y, c: (y * c).sum(1) / 0, ConfigError, "not finite at y = 0"),
    "kink": (lambda y, c: y.norm(dim=1), ConfigError, "not finite at y = 0"),
    "logarithm": (lambda y, c: y.log().sum(1), ConfigError, "not finite at y = 0"),
}


@pytest.mark.parametrize(("similarity", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_similarity_that_is_none_is_refused(similarity, error, message):
    module = SimilarityMap(similarity, Dense(3, 4), 4)
    for _ in range(2):  # Not only the first time.
        with pytest.raises(error, match=message):
            module.bind(torch.randn(3, 3))


def test_a_similarity_need_not_be_defined_where_states_never_are():
    # With ReLU y is at least 0, and below -1 the logarithm is none.
    module = SimilarityMap(lambda y, c: (y * c).sum(1) - 0.1 * torch.log1p(y).sum(1), Dense(3, 4), 4)
    assert torch.isfinite(EquilibriumLayer(module)(torch.randn(3, 3))).all()


def test_inference_mode_and_an_empty_batch():
    module = seeded(lambda: SimilarityMap(Student(), Dense(3, 5), 4))
    layer, x = EquilibriumLayer(module), random(5, 3)
    with torch.inference_mode():
        inferred = layer(x)
    torch.testing.assert_close(inferred, layer(x).detach())
    assert layer(x[:0]).shape == (0, 4)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="`similarity` to be a function"):
        SimilarityMap(3, Dense(3, 4), 4)
    with pytest.raises(ConfigError, match=r"function \(y, c\) or a module, got <class"):
        SimilarityMap(Student, Dense(3, 4), 4)
    with pytest.raises(ConfigError, match="`U` to be an opteq operator or a torch module"):
        SimilarityMap(Student(), torch.ones(3), 4)
    for channels in (0, 2.5, "4"):
        with pytest.raises(ConfigError, match="`channels` to be a whole number of at least 1"):
            SimilarityMap(Student(), Dense(3, 5), channels)
    with pytest.raises(ConfigError, match=r"Nesterov needs a bound"):
        EquilibriumLayer(ESTIMATED_MAPS["own"].map(), Nesterov())(ESTIMATED_MAPS["own"].inputs())
