"""`check_operator` finds what is wrong with an operator, and only that."""

import math
from dataclasses import dataclass

import pytest
import torch

from opteq import AlmostOrthogonal, Conv2d, Dense, check_operator
from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.operators.dense import BoundDense
from tests.conformance.instances import seeded
from tests.conformance.reference import matrix_of, spectral_norm


def changed(**methods):
    """A dense operator whose products, gradients or bounds are others than those of `Dense`."""
    kind = dataclass(frozen=True, eq=False)(type("Changed", (BoundDense,), methods))

    class Mine(Dense):
        def act(self, weights, domain, error):
            return kind(weights, domain, error, self._memo)

    return seeded(lambda: Mine(5, 4))


def test_the_report_is_that_of_the_weights_as_they_act():
    operator = Conv2d(3, 4, 3, norm=AlmostOrthogonal()).requires_grad_(False)
    before = [p.clone() for p in operator.parameters()]
    report = check_operator(operator, (3, 6, 6))
    assert report.bound == 1
    double = operator.double()
    assert report.norm == pytest.approx(spectral_norm(matrix_of(double, (3, 6, 6))).item(), rel=1e-6)
    for parameter, kept in zip(operator.parameters(), before, strict=True):
        assert torch.equal(parameter, kept.double())


def test_the_operator_that_makes_everything_zero():
    operator = Dense(3, 2)
    torch.nn.init.zeros_(operator.weight)
    assert check_operator(operator, (3,)).norm == 0


@pytest.mark.parametrize(
    "adjoint",
    [
        lambda self, y: y @ self.tensors[0] * (1 + 1e-6),
        lambda self, y: y @ self.tensors[0].flip(1),
        lambda self, y: torch.zeros(len(y), 5, dtype=y.dtype),
        lambda self, y: y @ self.tensors[0] + 1e-3,
        lambda self, y: y @ self.tensors[0] * math.nan,
    ],
    ids=["scaled", "permuted", "zero", "shifted", "nan"],
)
def test_a_wrong_adjoint_is_found(adjoint):
    with pytest.raises(ConfigError, match=r"`adjoint` of Mine is not the adjoint .* differ by"):
        check_operator(changed(adjoint=adjoint), (5,))


def test_a_bias_is_found():
    def with_bias(self, x):
        return BoundDense.__call__(self, x) + 0.1

    with pytest.raises(ConfigError, match="or that is not linear"):
        check_operator(changed(__call__=with_bias), (5,))


def test_a_wrong_gradient_of_the_weights_is_found():
    def halved(self, *pairs):
        return (sum(y.mT @ x for x, y in pairs) * 0.5,)

    with pytest.raises(ConfigError, match=r"`weight_gradient` of Mine .* differs by 5\.0e-01"):
        check_operator(changed(weight_gradient=halved), (5,))


@pytest.mark.parametrize("share", [0.999, 0.5, math.nan])
@pytest.mark.parametrize("name", ["norm_bound", "quick_norm_bound"])
def test_a_bound_below_the_norm_is_found(name, share):
    def low(self):
        return torch.linalg.matrix_norm(self.tensors[0].double(), 2) * share

    with pytest.raises(ConfigError, match=rf"`{name}` of Mine says .* never below the norm"):
        check_operator(changed(**{name: low}), (5,))


def test_a_bound_above_the_norm_is_none_of_its_business():
    def high(self):
        return torch.tensor(7.0, dtype=torch.float64)

    operator = changed(norm_bound=high, quick_norm_bound=high)
    report = check_operator(operator, (5,))
    assert report.bound == report.quick_bound == 7
    assert report.norm == pytest.approx(spectral_norm(operator.weight).item(), rel=1e-9)


def test_wrong_shapes_are_found():
    with pytest.raises(ShapeError, match=r"Expected `Wᵀ y` of Mine of shape \(3, 5\), got \(3, 4\)\."):
        check_operator(changed(adjoint=lambda self, y: y), (5,))
    with pytest.raises(ShapeError, match=r"after its `codomain`, of shape \(3, 4\), got \(3, 2\)\."):
        check_operator(changed(__call__=lambda self, x: x @ self.tensors[0][:2].mT), (5,))
    for codomain in ((2,), (4, 1)):
        with pytest.raises(ShapeError, match=r"`codomain` of Mine to begin with its `out_channels`, 4, and"):
            check_operator(changed(codomain=codomain), (5,))


@pytest.mark.parametrize("shape", [(4,), (5, 5), (), 5, torch.Size([2, 5]), (5.0,), torch.rand(2, 5)])
def test_a_shape_that_is_not_that_of_the_inputs_is_refused(shape):
    with pytest.raises(ShapeError, match=r"Expected `shape` like \(5\), the `in_channels` of Mine"):
        check_operator(changed(), shape)


def test_an_operator_without_channels_is_found():
    operator = Dense(3, 2)
    del operator.out_channels
    with pytest.raises(ConfigError, match="Dense has no `out_channels`, which maps ask for"):
        check_operator(operator, (3,))


def test_products_that_share_memory_are_found():
    same = {"__call__": lambda self, x: x, "adjoint": lambda self, y: y, "codomain": (5,)}
    operator = changed(**same)
    operator.out_channels = 5
    with pytest.raises(ConfigError, match="lies in the memory of what it is of"):
        check_operator(operator, (5,))


@pytest.mark.parametrize("moved", [lambda t: t - t.mean(0), lambda t: t + t.roll(1, 0)], ids=["mean", "turn"])
def test_products_that_mix_the_vectors_of_a_batch_are_found(moved):
    # Over the whole batch the mean is linear and its own adjoint.
    def product(self, x):
        return moved(x @ self.tensors[0].mT)

    def adjoint(self, y):
        return moved(y @ self.tensors[0])

    with pytest.raises(ConfigError, match=r"`W x` of Mine for one vector depends on the others"):
        check_operator(changed(__call__=product, adjoint=adjoint), (5,))
    with pytest.raises(ConfigError, match=r"`Wᵀ y` of Mine for one vector depends on the others"):
        check_operator(changed(adjoint=adjoint), (5,))


def test_products_without_the_weights_are_found():
    def constant(self, t):
        return t @ torch.eye(5, dtype=t.dtype)

    operator = changed(__call__=constant, adjoint=constant, codomain=(5,))
    operator.out_channels = 5
    with pytest.raises(ConfigError, match="does not depend on its weights"):
        check_operator(operator, (5,))


@pytest.mark.parametrize(("wrong", "got"), [(lambda g: g, "a tensor"), (lambda g: (g, g), "2 of them")])
def test_gradients_that_are_no_tuple_of_one_for_each_weight_are_found(wrong, got):
    def gradient(self, *pairs):
        return wrong(sum(y.mT @ x for x, y in pairs))

    with pytest.raises(ShapeError, match=rf"give a tuple of 1, .* got {got}"):
        check_operator(changed(weight_gradient=gradient), (5,))


def test_a_bound_may_be_a_number():
    operator = changed(quick_norm_bound=lambda self: 9.0, norm_bound=lambda self: 8.0)
    assert check_operator(operator, (5,)).bound == 8


def test_what_is_no_operator_or_has_no_numbers_is_refused():
    with pytest.raises(ConfigError, match="an opteq operator"):
        check_operator(torch.nn.Linear(3, 2), (3,))  # type: ignore[arg-type]
    operator = Dense(3, 2)
    torch.nn.init.constant_(operator.weight, math.inf)
    with pytest.raises(NonFiniteError, match="The weights of Dense"):
        check_operator(operator, (3,))
