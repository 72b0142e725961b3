"""What others change of layers and networks is bounded truly, or refused by its name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from opteq import (
    AffineChange,
    Compose,
    Conv2d,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    KernelMap,
    MOptEq,
    MoreauSkip,
    OptEqUnit,
    Parallel,
    Patches,
    Regularised,
    SquaredNorm,
    certify,
    robust_radius,
)
from opteq.activations import ReLU
from opteq.errors import ConfigError, NonFiniteError
from opteq.maps.base import EquilibriumMap, Injection
from opteq.maps.optequnit import OptEqEquation
from opteq.models.classifier import ImageClassifier
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from opteq.objectives.inner_product import SigmoidKernel
from opteq.operators.dense import BoundDense
from opteq.operators.norms.base import Nonexpansive
from opteq.operators.norms.orthogonal import Orthogonal
from opteq.theory.lipschitz import equilibrium_lipschitz, lipschitz_bound
from tests.conformance.reference import dense, spectral_norm

# `torch.nn.utils.weight_norm` says that it is superseded.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def network(head=None):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=0.7)
    return nn.Sequential(nn.Linear(3, 3), EquilibriumLayer(unit), head or nn.Linear(4, 2)).eval()


PLACES = {
    "stem": lambda n: n[0],
    "layer": lambda n: n[1],
    "map": lambda n: n[1].map,
    "injection": lambda n: n[1].map.injection,
    "U": lambda n: n[1].map.injection.operator,
    "W": lambda n: n[1].map.W,
    "head": lambda n: n[2],
    "network": lambda n: n,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("before", [True, False])
def test_a_forward_hook_anywhere_is_refused(place, before):
    network_, x = network(), torch.randn(2, 3)
    robust_radius(network_, x)
    module = place(network_)
    if before:
        # Silent where there is no input to look at, as when an operator is bound.
        handle = module.register_forward_pre_hook(lambda m, args: (10 * args[0],) if args else None)
    else:
        handle = module.register_forward_hook(lambda m, args, output: 10 * output)
    for ask in (robust_radius, lipschitz_bound):
        with pytest.raises(ConfigError, match="has a forward hook, which may change what it computes"):
            ask(network_, x)
    handle.remove()
    robust_radius(network_, x)


def test_a_hook_for_all_modules_is_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(ConfigError, match="Hooks for all modules"):
            lipschitz_bound(network(), torch.zeros(1, 3))
    finally:
        handle.remove()


def test_a_hook_around_a_layer_has_no_certificate():
    layer, x = network()[1], torch.randn(2, 3)
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handle = register(lambda *args: None)
        with pytest.raises(ConfigError, match="The layer has a forward hook"):
            certify(layer, x)
        handle.remove()
    certify(layer, x)


def test_a_hook_inside_a_layer_is_part_of_what_is_certified():
    layer, x = network()[1], torch.randn(4, 3)
    plain = certify(layer, x)
    layer.map.injection.operator.register_forward_hook(lambda module, args, output: 3 * output)
    hooked = certify(layer, x)
    with torch.no_grad():
        layer.map.injection.operator._forward_hooks.clear()
        layer.map.injection.operator.weight.mul_(3)
    torch.testing.assert_close(hooked.state, layer(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(hooked.state, plain.state, rtol=0.1)
    assert (hooked.distance_to_reference.value <= hooked.distance.value).all()


class Scaled(nn.Module):
    def forward(self, weight):
        return 5 * weight


def scaled_head():
    head = nn.Linear(4, 2)
    parametrize.register_parametrization(head, "weight", Scaled())
    return head


HEADS = {
    "own": scaled_head,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 2)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 2)),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_a_parametrized_head_counts_as_it_acts(make):
    parametrized, x = network(make()), torch.randn(3, 3)
    plain = network()
    with torch.no_grad():
        plain[2].weight.copy_(parametrized[2].weight)
        plain[2].bias.copy_(parametrized[2].bias)
    torch.testing.assert_close(robust_radius(parametrized, x), robust_radius(plain, x))
    torch.testing.assert_close(lipschitz_bound(parametrized, x).value, lipschitz_bound(plain, x).value)
    with pytest.raises(ConfigError, match=r"weights of 2 are computed anew at each use.*call eval\(\) first"):
        robust_radius(parametrized.train(), x)


def pruned(operator):
    prune.random_unstructured(operator, "weight", 0.4)


def old_weight_norm(operator):
    nn.utils.weight_norm(operator)
    with torch.no_grad():
        operator.weight_g.mul_(2)


@pytest.mark.parametrize("way", [pruned, old_weight_norm])
def test_hooks_of_torch_that_set_weights_are_run(way):
    classifier, x = network(), torch.randn(3, 3)
    unit = classifier[1].map
    for operator in (unit.W, unit.injection.operator):
        way(operator)
    classifier(x)  # leaves a weight behind that belongs to a graph
    radius = robust_radius(classifier, x)
    bound = certify(classifier[1], x).distance
    assert torch.isfinite(bound.value).all()
    plain = network()
    with torch.no_grad():
        plain[1].map.W.weight.copy_(unit.W.weight)
        plain[1].map.injection.operator.weight.copy_(unit.injection.operator.weight)
    torch.testing.assert_close(radius, robust_radius(plain, x), rtol=1e-5, atol=0)


class LoudLinear(nn.Linear):
    def forward(self, input):
        return 5 * super().forward(input)


class LoudConvolution(nn.Conv2d):
    """Torch's `forward` calls what is overridden here."""

    def _conv_forward(self, *args):
        return 5 * super()._conv_forward(*args)


class LoudCall(nn.Linear):
    def __call__(self, input):
        return 5 * super().__call__(input)


class LoudDense(Dense):
    def forward(self, x, error=0.0):
        return 5 * super().forward(x, error)


class Quieter(Dense):
    """Says at binding something else than it computes."""

    def bind(self, *args, **options):
        bound = super().bind(*args, **options)
        return bound.with_tensors(tuple(w / 5 for w in bound.tensors))


class LoudInjection(Injection):
    def forward(self, x, error=0.0):
        return 5 * super().forward(x, error)


class LoudLayer(EquilibriumLayer):
    def _equilibrium(self, x):
        return super()._equilibrium(5 * x)


class Halved(nn.Module):
    def forward(self, x):
        return x / 2

    def lipschitz(self, x):
        return 0.5


class LoudHalved(Halved):
    def forward(self, x):
        return 5 * super().forward(x)


class LoudClassifier(ImageClassifier):
    def forward(self, x):
        return 5 * super().forward(x)


def replaced(module, name):
    original = getattr(module, name)
    setattr(module, name, lambda x, *args, **options: 5 * original(x, *args, **options))
    return module


def with_injection():
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=0.7)
    unit.injection = LoudInjection(Dense(3, 6), 6, True)
    return EquilibriumLayer(unit)


STAGES = {
    "linear": (lambda: LoudLinear(3, 3), (3,), "LoudLinear"),
    "parametrized": (lambda: parametrizations.weight_norm(LoudLinear(3, 3)), (3,), "LoudLinear"),
    "convolution": (lambda: LoudConvolution(1, 1, 3), (1, 4, 4), "LoudConvolution"),
    "call": (lambda: LoudCall(3, 3), (3,), "LoudCall"),
    "method of an object": (lambda: replaced(nn.Linear(3, 3), "forward"), (3,), "Linear"),
    "operator": (lambda: LoudDense(3, 3), (3,), "LoudDense"),
    "factor": (lambda: Compose(Dense(3, 4), LoudDense(4, 3)), (3,), "Compose"),
    "bind": (lambda: Quieter(3, 3), (3,), "Quieter"),
    "injection": (with_injection, (3,), "LoudInjection"),
    "layer": (lambda: LoudLayer(OptEqUnit(Dense(4, 6), Dense(3, 6))), (3,), "LoudLayer"),
    "inherited constant": (LoudHalved, (3,), "LoudHalved"),
    "a jump": (lambda: nn.Softplus(threshold=1), (3,), "Softplus"),
}


@pytest.mark.parametrize(("make", "shape", "name"), STAGES.values(), ids=STAGES)
def test_a_stage_that_computes_in_its_own_way_is_refused(make, shape, name):
    stage = make().eval()
    for module in (stage, nn.Sequential(stage)):
        with pytest.raises(ConfigError, match=rf"No Lipschitz constant is known for \w*{name}; give it"):
            lipschitz_bound(module, torch.zeros(1, *shape))


def test_stages_are_not_inherited_by_who_overrides_what_is_done_with_them():
    classifier = LoudClassifier(nn.Identity(), nn.Flatten(), nn.Linear(16, 2)).eval()
    with pytest.raises(
        ConfigError, match="LoudClassifier overrides `forward`, so that the `stages` of Image"
    ):
        robust_radius(classifier, torch.randn(2, 1, 4, 4))


class Named(nn.Linear):
    """Computes nothing of its own."""

    def __init__(self, size):
        super().__init__(size, size)

    def extra_repr(self):
        return "named"

    def describe(self):
        return repr(self)


def test_a_subclass_that_changes_nothing_has_the_bound_of_its_base():
    named, plain = Named(3), nn.Linear(3, 3)
    named.load_state_dict(plain.state_dict())
    x = torch.zeros(1, 3)
    assert lipschitz_bound(named, x).value == lipschitz_bound(plain, x).value


class LoudUnit(OptEqUnit):
    """Its equation is louder than what is known of its base."""

    def bind(self, x, error=0.0):
        e = super().bind(x, error)
        return LoudEquation(e.injection, e.W, e.activation, e.mu)

    @property
    def injections(self):
        return (self.injection,)


class LoudEquation(OptEqEquation):
    def __call__(self, state):
        return 2 * super().__call__(state)


class LoudReLU(ReLU):
    def __call__(self, a):
        return 5 * super().__call__(a)

    def derivative(self, a):
        return 5 * super().derivative(a)

    def potential(self, a):
        return 5 * super().potential(a)

    def penalty(self, v):
        return super().penalty(v) - 0.4 * v.square()


class LoudSquare(SquaredNorm):
    def gradient(self, z):
        return 0.1 * z


class LoudKernel(SigmoidKernel):
    def slope(self, t):
        return 5 * super().slope(t)

    def curvature(self, t):
        return 5 * super().curvature(t)


class Overlapping(Patches):
    def split(self, x):
        return 5 * super().split(x)


class LoudCoupling(HeritageDiversity):
    def at(self, state, error=0.0):
        return super().at(tuple(5 * z for z in state), error)


class LoudProduct(BoundDense):
    def __call__(self, x):
        return 2 * super().__call__(x)

    def adjoint(self, y):
        return 2 * super().adjoint(y)


class LoudW(Dense):
    def act(self, weights, domain, error):
        return LoudProduct(weights, domain, error, self._memo)


class LoudSimilarity(GaussianSimilarity):
    def gradient(self, y):
        return 5 * super().gradient(y)


class LoudGaussian(GaussianMap):
    def bind(self, x, error=0.0):
        e = super().bind(x, error)
        s = e.similarity
        return type(e)(LoudSimilarity(s.injection, s.gamma, s.gram, s.W, s.patches), e.activation)

    @property
    def injections(self):
        return (self.injection,)


def unit(W=Dense, activation="relu", cls=OptEqUnit):
    return cls(W(4, 6), Dense(3, 6), activation, max_norm=0.4)


def patched():
    # 6 channels of 2×2 pixels.
    return GaussianMap(Conv2d(2, 6), Conv2d(3, 6), Overlapping(2, 2), hidden=3)


PARTS = {
    "equation": (lambda: unit(cls=LoudUnit), (3,), "LoudEquation overrides `__call__`"),
    "activation": (lambda: unit(activation=LoudReLU()), (3,), "LoudReLU overrides `__call__`"),
    "regulariser": (lambda: Regularised(unit(), LoudSquare(), 0.5), (3,), "LoudSquare overrides `gradient`"),
    "kernel": (lambda: KernelMap(Dense(4, 5), Dense(3, 4), LoudKernel()), (3,), "LoudKernel overrides"),
    "patches": (patched, (3, 2, 2), "Overlapping overrides `split`"),
    "coupling": (lambda: MOptEq([unit(), unit()], LoudCoupling()), (3,), "LoudCoupling overrides `at`"),
    "operator": (lambda: unit(LoudW), (3,), "LoudProduct overrides `__call__`"),
    "similarity": (
        lambda: LoudGaussian(Dense(4, 6), Dense(3, 6), gamma=0.5),
        (3,),
        "LoudSimilarity overrides `gradient`",
    ),
    "inside a skip": (lambda: MoreauSkip(unit(cls=LoudUnit)), (3,), "LoudEquation overrides `__call__`"),
    "inside a change": (lambda: AffineChange(unit(LoudW), torch.eye(4)), (3,), "LoudProduct overrides"),
    "a branch": (lambda: Parallel([unit(), unit(activation=LoudReLU())]), (3,), "LoudReLU overrides"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("make", "shape", "message"), PARTS.values(), ids=PARTS)
def test_a_part_that_computes_in_its_own_way_is_refused(make, shape, message):
    torch.manual_seed(0)
    equilibrium_map, x = make(), torch.randn(2, *shape)
    with pytest.raises(ConfigError, match=rf"{message}.*, so that the `\w+` of \w+ need not hold for it"):
        certify(EquilibriumLayer(equilibrium_map, on_unconverged="count"), x)
    with pytest.raises(ConfigError, match=message):
        equilibrium_lipschitz(equilibrium_map, x)


class Stated(LoudEquation):
    """States anew what is known of it."""

    def contraction(self, state=None):
        bound = super().contraction(state)
        return type(bound)(2 * bound.value, bound.kind, bound.assumptions)


class StatedUnit(OptEqUnit):
    def bind(self, x, error=0.0):
        e = super().bind(x, error)
        return Stated(e.injection, e.W, e.activation, e.mu)


def test_who_states_a_bound_anew_is_believed():
    torch.manual_seed(0)
    layer = EquilibriumLayer(unit(cls=StatedUnit))
    certificate = certify(layer, torch.randn(3, 3))
    torch.testing.assert_close(
        certificate.contraction.value, torch.full((3,), 2 * 0.4**2).double(), rtol=1e-5, atol=0
    )
    assert (certificate.distance_to_reference.value <= certificate.distance.value).all()


class Swollen(Orthogonal):
    def contracted(self, operator, stored):
        return 3 * super().contracted(operator, stored)


class Own(Nonexpansive):
    def contracted(self, operator, stored):
        return 3 * stored


class Believed(Nonexpansive):
    """Says itself that the norm is at most 1."""

    certified = True

    def contracted(self, operator, stored):
        return stored / torch.linalg.matrix_norm(stored).clamp(min=1)


@pytest.mark.parametrize("way", [Swollen(), Own()])
def test_the_norm_under_a_way_of_ones_own_is_bounded_as_that_of_any_weight(way):
    torch.manual_seed(0)
    operator = Dense(5, 4, norm=way).double()
    bound = operator.bind((5,), 0.9)
    norm = spectral_norm(dense(bound)).item()
    assert norm > 1
    assert norm <= bound.norm_bound().item() <= norm * (1 + 1e-8)
    assert Dense(5, 4, norm=Believed()).double().bind((5,), 0.9).norm_bound().item() == pytest.approx(0.9)


def test_a_bound_that_is_not_a_number_is_refused():
    norm = nn.BatchNorm1d(3).eval()
    norm.running_var.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="Weights of BatchNorm1d are NaN"):
        lipschitz_bound(norm, torch.zeros(1, 3))


def test_what_cannot_be_copied_is_refused_in_a_sentence():
    classifier = network()
    classifier.lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match="Sequential cannot be copied, which certificates"):
        robust_radius(classifier, torch.randn(2, 3))


def test_tensors_that_are_no_parameters_are_examined_in_float64_too():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.randn(6, 3)

        def forward(self, x):
            return nn.functional.linear(x, self.matrix)

    torch.manual_seed(0)
    U = Shifted()
    layer, before = EquilibriumLayer(OptEqUnit(Dense(4, 6), U)), copy.deepcopy(U.matrix)
    certificate = certify(layer, torch.randn(3, 3))
    assert (certificate.distance_to_reference.value <= certificate.distance.value).all()
    assert torch.equal(U.matrix, before)
    assert U.matrix.dtype == torch.float32


class Undeclared(OptEqUnit):
    def bind(self, x, error=0.0):
        return super().bind(3 * x, error)


def test_a_bind_on_the_object_alone_is_seen():
    assert issubclass(Undeclared, EquilibriumMap)
    changed = unit()
    changed.bind = lambda x, error=0.0: OptEqUnit.bind(changed, 3 * x, error)
    for module in (changed, unit(cls=Undeclared)):
        with pytest.raises(ConfigError, match="overrides `bind`, so that the bound of OptEqUnit"):
            equilibrium_lipschitz(module, torch.zeros(1, 3))
