"""The hidden variable of a unit as its readout."""

import numpy as np
import pytest
import torch

from opteq import (
    Anderson,
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    HeritageDiversity,
    HiddenReadout,
    Implicit,
    KernelMap,
    MOptEq,
    MoreauSkip,
    OptEqUnit,
    Parallel,
    Regularised,
    ShiftIsometry,
    SquaredNorm,
    certify,
)
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap
from opteq.maps.optequnit import OptEqEquation
from opteq.models.bodies import Coupled, Deep, Gaussian, Unit
from opteq.models.parts import build, complete
from opteq.results import tensors_of
from opteq.theory.lipschitz import equilibrium_lipschitz, lipschitz_bound


def layer_of(map: EquilibriumMap, tol: float = 1e-12) -> EquilibriumLayer:
    return EquilibriumLayer(HiddenReadout(map), Anderson(tol=tol, max_steps=500), Implicit(tol=tol)).double()


def dense_unit(**options) -> OptEqUnit:
    torch.manual_seed(0)
    return OptEqUnit(Dense(4, 6), Dense(3, 6), **options)


@pytest.mark.parametrize("mu", [1.0, 1.7])
@pytest.mark.spec("R1.4")
def test_it_solves_the_equation_of_the_hidden_variable(mu: float):
    unit = dense_unit(mu=mu)
    layer, x = layer_of(unit), torch.randn(5, 3, dtype=torch.float64)
    equation = unit.bind(x)
    W, c = equation.W.tensors[0].detach().numpy(), equation.injection.detach().numpy()
    y = np.zeros_like(c)
    for _ in range(3000):
        y = np.maximum(y @ W @ W.T / mu + c, 0)
    assert np.abs(y).max() > 0.1
    solution = layer.solve(x)
    np.testing.assert_allclose(solution.value.detach().numpy(), y, atol=1e-10)
    np.testing.assert_allclose(solution.state.detach().numpy(), y @ W / mu, atol=1e-10)


def test_its_gradient_is_that_of_two_thousand_iterations():
    unit = OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh")
    layer = layer_of(unit)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    equation = unit.bind(x)
    z = equation.initial()
    for _ in range(2000):
        z = equation(z)
    leaves = [x, *unit.parameters()]
    unrolled = torch.autograd.grad((weights * torch.tanh(equation.preactivation(z))).sum(), leaves)
    implicit = torch.autograd.grad((weights * layer(x)).sum(), leaves)
    for ours, theirs in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_its_distance_is_bounded_and_the_bound_is_not_that_of_the_state():
    layer, x = layer_of(dense_unit(), tol=1e-2), torch.randn(50, 3, dtype=torch.float64)
    rough = layer.solve(x)
    exact = layer_of(dense_unit()).solve(x).value
    moved = (rough.value - exact).norm(dim=1)
    certificate = certify(layer, x)
    assert moved.max() > 1e-5
    assert (moved <= certificate.distance.value).all()
    torch.testing.assert_close(certificate.distance_to_reference.value, moved.detach(), atol=1e-9, rtol=1e-6)
    of_state = EquilibriumLayer(dense_unit().double()).bind(x).distance_bound(rough.state)
    norm = torch.linalg.matrix_norm(layer.map.map.bind(x).W.tensors[0], 2).detach()
    torch.testing.assert_close(certificate.distance.value, norm * of_state.value, rtol=1e-3, atol=0)


def test_its_lipschitz_bound_is_attained_where_all_units_are_active():
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    values = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    unit = OptEqUnit(Dense(3, 3), Dense(3, 3), max_norm=None).double()
    unit.W.weight.data = u @ values.diag() @ v
    unit.injection.operator.weight.data = 2 * u @ u.mT
    unit.injection.bias.data.fill_(50.0)
    layer = layer_of(unit)
    x = torch.randn(1, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x).view(3, 3)
    bound = lipschitz_bound(layer, x).value.item()
    assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(bound, rel=1e-3)
    assert bound == pytest.approx(2 / (1 - 0.81), rel=1e-3)


@pytest.mark.parametrize(("inputs", "alone"), [(6, True), (3, False)])
def test_a_square_shift_isometry_leaves_every_hidden_number_inside_an_image_to_itself(inputs, alone):
    torch.manual_seed(0)
    W = Conv2d(inputs, 6, norm=ShiftIsometry())
    layer = layer_of(OptEqUnit(W, Conv2d(2, 6), max_norm=0.9))
    x = torch.randn(2, 2, 7, 7, dtype=torch.float64)
    y = layer(x)
    c = layer.map.map.injection(x)
    # One step of the kernel to the border, there and back.
    inside = (slice(None), slice(None), slice(2, -2), slice(2, -2))
    norm = 0.9 * (1 - 4 * (inputs * 6 * 9 // min(inputs, 6)) * 2**-23)  # less what rounding may add
    expected = torch.relu(c) / (1 - norm**2)
    assert torch.allclose(y[inside], expected[inside], rtol=1e-5) == alone


@pytest.mark.parametrize("body", [Unit, Coupled])
def test_one_per_branch(body):
    torch.manual_seed(0)
    branches = body(4, [6, 7], reductions=[1, 2], readout="hidden", solver=Anderson(tol=1e-5)).eval()
    first, second = branches(torch.randn(2, 4, 6, 6))
    assert first.shape == (2, 6, 6, 6)
    assert second.shape == (2, 7, 3, 3)


def test_a_body_of_several_units_reads_the_last():
    torch.manual_seed(0)
    body = Deep(4, [6, 7], readout="hidden", regulariser=SquaredNorm())
    assert body(torch.randn(2, 4, 6, 6)).shape == (2, 7, 6, 6)


class Unusual(Regularised):
    """One whose equation is another's."""

    def bind(self, x, error=0.0):
        return KernelMap(Dense(3, 4), Dense(3, 3)).bind(x)


def test_it_is_called_by_the_map_that_is_read():
    assert HiddenReadout(dense_unit()).title == "OptEqUnit, hidden variable"


def test_maps_of_units_do_not_take_it_for_one():
    hidden = HiddenReadout(dense_unit())
    with pytest.raises(ConfigError, match="HiddenReadout"):
        DeepOptEq([hidden])
    with pytest.raises(ConfigError, match="HiddenReadout"):
        MOptEq([hidden, hidden])
    with pytest.raises(ConfigError, match="Only OptEq units have a hidden variable"):
        HiddenReadout(hidden)
    with pytest.raises(ConfigError, match=r"Only OptEq units .*KernelMap"):
        HiddenReadout(Parallel([dense_unit(), KernelMap(Dense(3, 4), Dense(3, 3))]))
    with pytest.raises(ConfigError, match=r"Only OptEq units .*MoreauSkip"):
        HiddenReadout(Regularised(MoreauSkip(dense_unit()), SquaredNorm(), 0.1))
    with pytest.raises(ConfigError, match="has no hidden variable"):
        HiddenReadout(Unusual(dense_unit(), SquaredNorm(), 0.1)).bind(torch.randn(2, 3))
    for inside in (hidden, MoreauSkip(hidden, 0.5)):
        with pytest.raises(ConfigError, match="put HiddenReadout round the whole"):
            Regularised(inside, SquaredNorm(), 0.1).bind(torch.randn(2, 3))
    with pytest.raises(ConfigError, match="Only OptEq units have a hidden variable"):
        Gaussian(4, 8, readout="hidden")
    with pytest.raises(ConfigError, match="readout"):
        Unit(4, 6, readout="Hidden")


def units(*activations: str) -> list[OptEqUnit]:
    torch.manual_seed(0)
    return [OptEqUnit(Dense(4, 6), Dense(3, 6), activation) for activation in activations]


def coupled(weight: float = 0.02) -> MOptEq:
    return MOptEq(units("tanh", "relu"), HeritageDiversity(weight, tau=0.2))


MAPS = {
    "deep": lambda: DeepOptEq(units("relu", "tanh", "softplus"), 0.7),
    "regularised": lambda: Regularised(DeepOptEq(units("tanh", "relu"), 0.7), SquaredNorm(), 0.3),
    "parallel": lambda: Parallel(units("tanh", "relu")),
    "coupled": coupled,
    "one after the other": lambda: MOptEq(units("tanh", "relu"), HeritageDiversity(0.02), "gauss-seidel"),
}


def by_hand(layer: EquilibriumLayer, x: torch.Tensor, steps: int = 600) -> tuple[torch.Tensor, ...]:
    """Hidden variables after many iterations of the map, with nothing but its units' matrices."""
    inner = layer.map.map
    equation = inner.bind(x)
    state = equation.initial()
    for _ in range(steps):
        state = equation(state)
    if isinstance(inner, MOptEq):
        states = equation.coupling.gradient(state)
    elif isinstance(inner, Parallel):
        states = state
    else:
        if isinstance(inner, Regularised):
            state, inner = state - inner.gamma * state, inner.map
        for unit, alpha in zip(inner.units[:-1], [0.7] * 3, strict=False):
            state = alpha * unit.bind(x)(state) + (1 - alpha) * state
        states = (state,)
    members = inner.maps if isinstance(inner, Parallel) else inner.units
    pairs = zip(members[-len(states) :], states, strict=True)
    return tuple(u.activation(z @ u.bind(x).W.tensors[0].mT + u.injection(x)) for u, z in pairs)


@pytest.mark.parametrize("kind", MAPS)
def test_that_of_several_units_is_what_their_matrices_make_of_the_equilibrium(kind: str):
    layer, x = layer_of(MAPS[kind]()), torch.randn(5, 3, dtype=torch.float64)
    read = tensors_of(layer(x))
    expected = by_hand(layer, x)
    assert len(read) == len(expected) == (1 if kind in ("deep", "regularised") else 2)
    for ours, theirs in zip(read, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["deep", "regularised", "parallel"])
def test_z_is_what_the_last_unit_makes_of_it(kind: str):
    layer, x = layer_of(MAPS[kind]()), torch.randn(5, 3, dtype=torch.float64)
    solution = layer.solve(x)
    inner = layer.map.map
    for y, z in zip(tensors_of(solution.value), tensors_of(solution.state), strict=True):
        if kind == "parallel":
            unit = inner.maps[0] if y is tensors_of(solution.value)[0] else inner.maps[1]
            torch.testing.assert_close(y @ unit.bind(x).W.tensors[0], z)
        else:
            deep = inner.map if kind == "regularised" else inner
            before = z - inner.gamma * z if kind == "regularised" else z
            for unit in deep.units[:-1]:
                before = 0.7 * unit.bind(x)(before) + 0.3 * before
            torch.testing.assert_close(0.7 * y @ deep.units[-1].bind(x).W.tensors[0] + 0.3 * before, z)


@pytest.mark.parametrize("kind", MAPS)
def test_the_gradient_of_several_units_is_that_of_six_hundred_iterations(kind: str):
    layer, x = layer_of(MAPS[kind]()), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    weights = [torch.randn(2, 6, dtype=torch.float64) for _ in range(2)]
    leaves = [x, *layer.parameters()]

    def gradients(read):
        total = sum((w * y).sum() for w, y in zip(weights, tensors_of(read), strict=False))
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    for ours, theirs in zip(gradients(layer(x)), gradients(by_hand(layer, x, 600)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("kind", MAPS)
def test_the_distances_of_several_units_are_bounded(kind: str):
    x = torch.randn(50, 3, dtype=torch.float64)
    exact = tensors_of(layer_of(MAPS[kind]()).solve(x).value)
    for tol in (1e-1, 1e-2, 1e-3):
        layer = layer_of(MAPS[kind](), tol)
        rough = layer.solve(x)
        moved = sum(
            (a - b).square().sum(1) for a, b in zip(tensors_of(rough.value), exact, strict=True)
        ).sqrt()
        bound = certify(layer, x).distance.value
        assert moved.max() > 1e-6
        assert (moved <= bound).all()
        assert (bound < 1e4 * moved.max()).all()


@pytest.mark.parametrize("kind", MAPS)
def test_the_lipschitz_bound_of_several_units_holds(kind: str):
    layer = layer_of(MAPS[kind]())
    torch.manual_seed(2)

    def read(x):
        return torch.cat(tensors_of(layer(x)), 1)

    steepest = 0.0
    for _ in range(20):
        x = torch.randn(1, 3, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(read, x).flatten(0, 1).flatten(1)
        steepest = max(steepest, torch.linalg.matrix_norm(jacobian, 2).item())
    bound = layer.map.bind(x).equilibrium_lipschitz(
        iter(torch.linalg.matrix_norm(u.operator.weight, 2).item() for u in layer.map.injections)
    )
    assert steepest <= bound < 30 * steepest


def test_equal_branches_attain_their_bound_where_all_is_active():
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    first, second = (OptEqUnit(Dense(3, 3), Dense(3, 3), max_norm=None, mu=1.3).double() for _ in range(2))
    for unit in (first, second):
        unit.W.weight.data = u @ torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64).diag()
        unit.injection.operator.weight.data = 2 * u @ u.mT
        unit.injection.bias.data.fill_(50.0)
    branches = MOptEq([first, second], HeritageDiversity(diversity=False))
    layer, x = layer_of(branches), torch.randn(1, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.cat(layer(x), 1), x).view(6, 3)
    bound = layer.map.bind(x).equilibrium_lipschitz(iter((2.0, 2.0)))
    assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(bound, rel=1e-3)


BODIES = [
    ("Unit", {}, 64),
    ("Unit", {"hidden": 24}, 24),
    ("Unit", {"hidden": 24, "readout": "state"}, 8),
    ("Deep", {"hidden": [9, 12]}, 12),
    ("Coupled", {"hidden": [9, 9]}, 9),
]


@pytest.mark.parametrize(("body", "options", "channels"), BODIES)
def test_the_head_follows_what_is_read(body, options, channels):
    parts = {
        "stem": {"class_path": "opteq.models.stems.ConvStem", "init_args": {"channels": 8}},
        "body": {
            "class_path": f"opteq.models.bodies.{body}",
            "init_args": {"readout": "hidden", "max_norm": 0.8, **options},
        },
        "head": {
            "class_path": "opteq.models.heads.Head",
            "init_args": {"branches": 2 if body == "Coupled" else 1},
        },
    }
    network = {"class_path": "opteq.models.classifier.ImageClassifier", "init_args": parts}
    complete(network, 3, 10)
    assert parts["head"]["init_args"]["channels"] == channels
    assert build(network)(torch.rand(2, 3, 8, 8)).shape == (2, 10)


def test_no_units_and_bodies_of_others_are_left_to_who_builds_them():
    deep = {"class_path": "opteq.models.bodies.Deep", "init_args": {"hidden": [], "readout": "hidden"}}
    other = {"class_path": "torch.nn.Identity", "init_args": {"readout": "hidden"}}
    for body, channels in ((deep, None), (other, 8)):
        stem = {"class_path": "opteq.models.stems.ConvStem", "init_args": {"channels": 8}}
        head = {"class_path": "opteq.models.heads.Head", "init_args": {}}
        parts = {"stem": stem, "body": body, "head": head}
        complete({"class_path": "opteq.models.classifier.ImageClassifier", "init_args": parts}, 3, 10)
        assert head["init_args"].get("channels") == channels


class Loud(OptEqEquation):
    """A hundred times the `y`, and the same `z`, of which it states all that holds."""

    def hidden(self, state):
        return 100 * super().hidden(state)

    def __call__(self, state):
        return self.pool(OptEqEquation.hidden(self, state))

    def contraction(self, state=None):
        return OptEqEquation.contraction(self, state)

    def distance_bound(self, state):
        return OptEqEquation.distance_bound(self, state)

    def rates(self, pushes):
        return OptEqEquation.rates(self, pushes)

    def equilibrium_lipschitz(self, pushes):
        return OptEqEquation.equilibrium_lipschitz(self, pushes)


class LoudAndHonest(Loud):
    def hidden_rates(self, pushes):
        push, pull = OptEqEquation.hidden_rates(self, pushes)
        return 100 * push, 100 * pull


class Shouting(OptEqUnit):
    equation: type[Loud] = Loud

    @property
    def injections(self):
        return (self.injection,)

    def bind(self, x, error=0.0):
        bound = super().bind(x, error)
        return self.equation(bound.injection, bound.W, bound.activation, bound.mu, bound.kept)


def test_who_changes_the_hidden_variable_has_to_state_its_bounds():
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    layer = layer_of(Shouting(Dense(4, 6), Dense(3, 6))).eval()
    for ask in (lambda: certify(layer, x), lambda: equilibrium_lipschitz(layer.map, x)):
        with pytest.raises(ConfigError, match="hidden_"):
            ask()
    # Its state is certified as ever.
    certify(EquilibriumLayer(layer.map.map, Anderson(tol=1e-10)).eval(), x)
    layer.map.map.equation = LoudAndHonest
    jacobian = torch.autograd.functional.jacobian(lambda a: layer(a)[0], x[:1]).squeeze(1)
    assert torch.linalg.matrix_norm(jacobian, 2) <= equilibrium_lipschitz(layer.map, x).value
    assert certify(layer, x).distance.value.isfinite().all()


def test_what_reading_rounds_is_in_the_distance():
    torch.manual_seed(0)
    unit, x = OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=0.05), torch.randn(8, 3)
    layer = EquilibriumLayer(HiddenReadout(unit), Anderson(tol=2e-6)).eval()
    y, certificate = layer(x), certify(layer, x)
    exact = layer_of(unit)(x.double())
    assert ((y - exact).norm(dim=1) <= 1.001 * certificate.distance.value).all()
    assert (certificate.distance.value < 1e-6).all()


def test_what_branches_know_of_their_first_iterate_is_kept():
    equation = HiddenReadout(coupled()).bind(torch.randn(2, 3)).detach()
    assert equation.inner.start is not None
