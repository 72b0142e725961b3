"""The layer as a module: construction, inputs, use beside other modules, copies."""

import copy
import pickle
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from opteq import (
    Anderson,
    Broyden,
    Conv2d,
    Dense,
    EquilibriumLayer,
    Implicit,
    Nesterov,
    OptEqUnit,
    Picard,
    Unrolled,
)
from opteq.equation import Equation
from opteq.errors import ConfigError, NonFiniteError, OpteqError, ShapeError
from opteq.layer import solve_log
from opteq.maps.base import EquilibriumMap
from tests.solvers.problems import TwoBranches


def unit(state=6, hidden=8, inputs=4):
    return OptEqUnit(Dense(state, hidden), Dense(inputs, hidden))


def test_the_value_is_an_equilibrium():
    torch.manual_seed(0)
    layer = EquilibriumLayer(unit(), Anderson(tol=1e-10)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    solution = layer.solve(x)
    torch.testing.assert_close(layer.bind(x)(solution.value), solution.value, rtol=0, atol=1e-8)
    assert torch.equal(layer(x), solution.value)
    assert solution.info.converged.all()
    assert solution.trace is None


def test_defaults_are_anderson_and_implicit_differentiation():
    layer = EquilibriumLayer(unit())
    assert (layer.solver, layer.gradient, layer.on_unconverged) == (Anderson(), Implicit(), "warn")


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Nesterov()])
def test_solver_and_tolerance_are_those_given(solver):
    torch.manual_seed(0)
    layer = EquilibriumLayer(unit(), solver)
    info = layer.solve(torch.randn(1, 4)).info
    assert info.residuals[0, -1] <= solver.tol
    assert (info.residuals[0, :-1] > solver.tol).all()


def test_works_inside_sequential():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        EquilibriumLayer(OptEqUnit(Conv2d(5, 4), Conv2d(3, 4))),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 36, 2),
    )
    logits = model(torch.randn(3, 1, 6, 6))
    assert logits.shape == (3, 2)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_an_empty_batch_passes_through_and_back():
    layer = EquilibriumLayer(unit())
    with solve_log(layer) as log:
        z = layer(torch.zeros(0, 4))
        z.sum().backward()
    assert z.shape == (0, 6)
    assert (log.forward.samples, log.adjoint.samples, log.forward.residual_max) == (0, 0, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_is_refused_by_sample(value):
    layer = EquilibriumLayer(OptEqUnit(Conv2d(3, 4), Conv2d(2, 4)))
    x = torch.randn(5, 2, 4, 4)
    x[1, 0, 2, 3] = x[4, 1, 0, 0] = value
    for call in (layer, layer.solve, layer.bind):
        with pytest.raises(
            NonFiniteError, match=r"got NaN or infinite values in samples 1, 4; clean or drop them"
        ):
            call(x)


def test_a_long_list_of_bad_samples_is_cut_short():
    layer = EquilibriumLayer(unit())
    with pytest.raises(NonFiniteError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7, …;"):
        layer(torch.full((20, 4), torch.nan))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, r"Expected `x` to be a tensor of shape \(batch, ...\), got NoneType"),
        ([[1.0, 2.0, 3.0, 4.0]], r"Expected `x` to be a tensor of shape \(batch, ...\), got list"),
        (torch.tensor(1.0), r"Expected `x` to be a tensor of shape \(batch, ...\), got \(\)"),
        (torch.zeros(4), r"Expected `x` of shape \(batch, 4\), got \(4,\)"),
        (torch.zeros(2, 5), r"Expected `x` of shape \(batch, 4\), got \(2, 5\)"),
        (torch.zeros(2, 4, 0, 3), r"samples of `x` that are not empty, got `x` of shape \(2, 4, 0, 3\)"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), r"Expected `x` to be one tensor, got tuple"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(x, message):
    with pytest.raises(ShapeError, match=message):
        EquilibriumLayer(unit())(x)


def test_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(ConfigError, match="Expected `map` to be an equilibrium map such as OptEqUnit"):
        EquilibriumLayer(nn.Linear(3, 3))
    with pytest.raises(
        ConfigError, match=r"Expected `solver` to be a solver such as Anderson\(\), got 'anderson'"
    ):
        EquilibriumLayer(unit(), "anderson")
    with pytest.raises(ConfigError, match=r"Expected `solver` to be a solver .*, got <class"):
        EquilibriumLayer(unit(), Anderson)
    with pytest.raises(
        ConfigError, match=r"Expected `gradient` to be a gradient method such as Implicit\(\)"
    ):
        EquilibriumLayer(unit(), gradient=Anderson())
    with pytest.raises(
        ConfigError, match="Expected `on_unconverged` to be one of count, warn, raise, got 'ignore'"
    ):
        EquilibriumLayer(unit(), on_unconverged="ignore")
    with pytest.raises(TypeError, match="bogus"):
        EquilibriumLayer(unit(), bogus=3)


def test_what_was_assigned_later_is_looked_at_too():
    layer = EquilibriumLayer(unit())
    layer.solver = "anderson"
    with pytest.raises(ConfigError, match=r"Expected `solver` to be a solver .*, got 'anderson'"):
        layer(torch.zeros(1, 4))
    layer = EquilibriumLayer(unit(), gradient=Unrolled(5))
    layer.gradient = Implicit()
    with pytest.raises(ConfigError, match=r"Expected `solver` to be a solver .*, got None"):
        layer(torch.zeros(1, 4))
    layer.gradient = "implicit"
    with pytest.raises(ConfigError, match=r"Expected `gradient` to be a gradient method .*, got 'implicit'"):
        layer(torch.zeros(1, 4))


def test_what_holds_no_layers_is_not_logged():
    with (
        pytest.raises(ConfigError, match=r"Expected `module` to be a torch module .*, got 'layer'"),
        solve_log("layer"),
    ):
        pass


def test_a_trace_is_wanted_or_not():
    with pytest.raises(ConfigError, match="Expected `trace` to be True or False, got 'energy'"):
        EquilibriumLayer(unit()).solve(torch.zeros(1, 4), trace="energy")


def test_complex_numbers_are_not_to_be_cast_to_real_ones():
    with pytest.raises(ShapeError, match=r"got torch\.complex64\.$"):
        EquilibriumLayer(unit())(torch.zeros(1, 4, dtype=torch.complex64))


def test_unrolled_differentiation_refuses_a_solver():
    with pytest.raises(ConfigError, match="Unrolled replaces the solve; leave out `solver`"):
        EquilibriumLayer(unit(), Anderson(), Unrolled(5))
    assert EquilibriumLayer(unit(), gradient=Unrolled(5)).solver is None


def test_errors_are_errors_of_the_library_and_of_their_kind():
    assert issubclass(ConfigError, OpteqError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(NonFiniteError, ValueError)


def test_a_tolerance_below_the_precision_of_autocast_is_refused():
    layer = EquilibriumLayer(unit(), Anderson(tol=1e-4))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ConfigError, match=r"tol=0\.0001 cannot be reached under bfloat16 autocast; use at least 0\.008,"
        ) as refusal,
    ):
        layer(torch.randn(2, 4))
    # What it recommends works.
    assert 'x.float() within torch.autocast("cpu", enabled=False)' in str(refusal.value)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert layer(torch.randn(2, 4)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_converted_layer_says_which_tolerance_is_possible(dtype):
    torch.manual_seed(0)
    layer = EquilibriumLayer(unit(), Anderson(tol=1e-3), Implicit(tol=1e-3), "raise").to(dtype)
    x = torch.randn(3, 4).to(dtype)
    name = str(dtype).removeprefix("torch.")
    pattern = (
        rf"tol=0\.001 cannot be reached in {name}; use at least (\S+) or a wider dtype\. It is the `tol` of "
    )
    with pytest.raises(
        ConfigError, match=rf"{pattern}the solver, as in .*solver=Anderson\(tol=\1\)"
    ) as refusal:
        layer(x)
    assert "or --model.network.body.solver.tol=" in str(refusal.value)
    assert "layer.to(torch.float32), or --trainer.precision=32" in str(refusal.value)
    # What it recommends is reached, there and in the adjoint solve, which is asked for when it is needed.
    layer.solver = Anderson(tol=float(re.search(pattern, str(refusal.value))[1]))
    for method in ("cg", "anderson", "gmres"):
        layer.gradient = Implicit(tol=1e-3, method=method)
        z = layer(x)
        with pytest.raises(ConfigError, match=rf"{pattern}the gradient, as in .*gradient=Implicit\(tol=\1\)"):
            z.sum().backward()
        layer.gradient = Implicit(tol=layer.solver.tol, method=method)
        layer(x).sum().backward()
    assert layer.map.W.weight.grad.dtype == dtype


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(make_copy):
    torch.manual_seed(0)
    layer = EquilibriumLayer(unit(), Anderson(tol=1e-10)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    z = layer(x)
    z.sum().backward()
    with solve_log(layer) as log:
        twin = make_copy(layer)
        torch.testing.assert_close(twin(x), z, rtol=0, atol=1e-6)
    assert log.forward.samples == 0
    assert twin._logs == []
    with torch.no_grad():
        twin.map.W.weight.zero_()
    assert (twin(x) - z).abs().max() > 1e-2
    torch.testing.assert_close(layer(x), z, rtol=0, atol=1e-12)


def test_the_state_dict_holds_the_parameters_and_nothing_else():
    torch.manual_seed(0)
    layer, other = (EquilibriumLayer(unit(), Anderson(tol=1e-10)).double().eval() for _ in range(2))
    x = torch.randn(3, 4, dtype=torch.float64)
    layer(x)
    state = layer.state_dict()
    assert sorted(state) == ["map.W.weight", "map.injection.bias", "map.injection.operator.weight"]
    assert (layer(x) - other(x)).abs().max() > 1e-2
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), layer(x))


def test_a_state_of_branches_comes_back_as_a_tuple():
    torch.manual_seed(0)
    first, second = EquilibriumLayer(TwoBranches())(torch.randn(4, 6, dtype=torch.float64))
    assert first.shape == (4, 3)
    assert second.shape == (4, 2, 2, 2)


def test_its_text_names_solver_and_gradient():
    text = repr(EquilibriumLayer(unit(), Picard(tol=1e-3)))
    assert "solver=Picard(tol=0.001" in text
    assert "gradient=Implicit(" in text


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_numbers_that_are_not_floating_point_are_refused(dtype):
    layer = EquilibriumLayer(OptEqUnit(Dense(2, 3), Dense(2, 3)))
    with pytest.raises(ShapeError, match="floating-point numbers, got torch"):
        layer(torch.zeros(1, 2, dtype=dtype))


def test_an_input_of_another_dtype_is_answered_with_how_to_convert():
    layer = EquilibriumLayer(OptEqUnit(Dense(3, 4), Dense(2, 4)))
    with pytest.raises(ShapeError, match=r"torch.float32 .*, got torch.float64; convert `x` with x.to"):
        layer(torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(3)])
def test_an_empty_batch_gives_an_empty_equilibrium_at_one_evaluation(gradient):
    solver = None if isinstance(gradient, Unrolled) else Anderson()
    layer = EquilibriumLayer(OptEqUnit(Dense(3, 4), Dense(2, 4)), solver, gradient)
    solution = layer.solve(torch.zeros(0, 2))
    assert solution.value.shape == (0, 3)
    assert solution.info.evaluations == (3 if solver is None else 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_network_computes_the_same():
    # Wide enough for the compiled code of the package, whose calls a tracing compiler must not follow.
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(16, 32), Conv2d(3, 32))
    network = torch.nn.Sequential(EquilibriumLayer(unit), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 2))
    x = torch.randn(8, 3, 8, 8)
    results = []
    for module in (network, torch.compile(network, backend="aot_eager")):
        given = x.clone().requires_grad_()
        value = module(given)
        value.sum().backward()
        results.append((value.detach(), given.grad))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_the_injection_of_a_compiled_layer_is_left_to_the_compiler(grad):
    # Its operator is wide enough for the compiled code of the package too, and is outside the solve.
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(16, 16), Conv2d(16, 16))).eval()
    x = torch.randn(8, 16, 16, 16)
    with torch.set_grad_enabled(grad):
        compiled = torch.compile(layer, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True, eq=False)
class Kept(Equation):
    """`z = c` or, from there, `z = z`, which return a tensor that is theirs and their argument."""

    c: torch.Tensor
    constant: bool

    def __call__(self, state):
        return self.c if self.constant else state

    def initial(self):
        return self.c.detach().clone()

    def contraction(self, state=None):
        raise NotImplementedError


class KeptMap(EquilibriumMap):
    def __init__(self, constant):
        super().__init__()
        self.constant = constant

    def bind(self, x, error=0.0):
        return Kept(x, self.constant)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("solver", [Picard(), Anderson()])
@pytest.mark.parametrize("grad", [True, False])
def test_who_changes_the_value_changes_nothing_else(constant, solver, grad):
    x = torch.randn(3, 4)
    before = x.clone()
    value = EquilibriumLayer(KeptMap(constant), solver)(x.requires_grad_(grad))
    image = value.grad_fn.saved_tensors[-1] if grad else x
    with torch.no_grad():
        value.fill_(9)
    assert torch.equal(x, before)
    assert torch.equal(image, before)
