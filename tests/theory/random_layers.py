"""Random layers and attacks on what is certified of them.

`python -m tests.theory.random_layers 10000 [SEED]` draws so many of them and prints what was broken.
"""

import random
import sys
import time
import warnings
from collections import Counter

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from opteq import (
    AbsoluteNorm,
    AffineChange,
    Anderson,
    AveragePool,
    Compose,
    Conv2d,
    DeepOptEq,
    Dense,
    DepthwiseSeparableConv2d,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    HiddenReadout,
    Implicit,
    Incay,
    KernelMap,
    KernelMOptEq,
    LinearMixing,
    MOptEq,
    MoreauSkip,
    MultiBlockOptEq,
    OptEqUnit,
    Parallel,
    Patches,
    Regularised,
    SquaredNorm,
    WideOptEq,
    certify,
    robust_radius,
)
from opteq.errors import ConfigError, ConvergenceError
from opteq.operators.base import LinearOperator
from opteq.operators.norms.almost_orthogonal import AlmostOrthogonal
from opteq.operators.norms.base import NormControl
from opteq.operators.norms.ceiling import Ceiling
from opteq.operators.norms.orthogonal import Orthogonal
from opteq.operators.norms.shift_isometry import ShiftIsometry
from opteq.operators.norms.unconstrained import Unconstrained
from opteq.operators.norms.weight_normalised import WeightNormalised
from opteq.results import tensors_of
from opteq.solvers.base import solve_fixed_point
from opteq.theory.lipschitz import equilibrium_lipschitz

WAYS = (Ceiling, Ceiling, AlmostOrthogonal, Orthogonal, ShiftIsometry, WeightNormalised, Unconstrained)
ACTIVATIONS = ("relu", "relu", "tanh", "softplus", "elu", "sigmoid", "leaky_relu", "hardtanh", "identity")
INPUT, SIDES = 3, (2, 4)
AT_A_TIME = 100  # layers, after which it is said how it stands


class Draw(random.Random):
    """What layers are made of; vectors of 3 numbers, or images of 3 channels and 2×4 pixels, go in."""

    def __init__(self, seed):
        super().__init__(seed)
        torch.manual_seed(seed)
        self.image = self.random() < 0.35

    def size(self):
        return 2 * self.randint(1, 3)

    def operator(self, inputs, outputs):
        way = self.choice(WAYS)()
        if not self.image:
            return Dense(inputs, outputs, norm=way)
        if self.random() < 0.2:
            return DepthwiseSeparableConv2d(inputs, outputs)
        return Conv2d(inputs, outputs, self.choice((1, 3)), norm=way)

    def injection(self, outputs):
        """An operator, or a network of torch's."""
        match self.randrange(4):
            case 0 if self.image:
                return nn.Sequential(nn.Conv2d(INPUT, outputs, 3, padding=1), nn.ReLU())
            case 0:
                return nn.Sequential(nn.Linear(INPUT, 5), nn.Tanh(), nn.Linear(5, outputs))
            case 1 if self.image:
                return Compose(Conv2d(INPUT, 4), Conv2d(4, outputs))
            case _:
                return Conv2d(INPUT, outputs) if self.image else Dense(INPUT, outputs)

    def max_norm(self):
        return self.choice((0.3, 0.7, 0.9, 0.97))

    def unit(self, state=4):
        hidden, mu = self.size(), self.choice((1.0, 1.0, 1.7))
        W, U = self.operator(state, hidden), self.injection(hidden)
        return OptEqUnit(W, U, self.choice(ACTIVATIONS), mu=mu, max_norm=self.max_norm())

    def gaussian(self):
        mid, options = self.size(), {"activation": self.choice(("relu", "tanh", "softplus"))}
        if self.image and self.random() < 0.6:
            options |= {"patches": Patches(2, 2), "hidden": 3}
        gamma = self.choice(("adaptive", "mean", 0.05, 0.5))
        norm = self.choice((0.9, 0.97, 1.2))
        return GaussianMap(self.operator(4, mid), self.injection(mid), gamma=gamma, max_norm=norm, **options)

    def kernel(self, state=4, mid=None):
        W = self.operator(state, mid or self.size())
        activation, kernel = self.choice(("relu", "tanh")), self.choice(("linear", "sigmoid", "polynomial"))
        return KernelMap(W, self.injection(state), kernel, activation=activation, max_norm=self.max_norm())

    def mixing(self):
        matrix = torch.randn(4, 4)
        W = Conv2d(4, 4) if self.image else Dense(4, 4)
        return LinearMixing(W, self.injection(4), matrix @ matrix.mT + torch.eye(4))

    def simple(self):
        """A map whose state is one tensor of 4 channels."""
        return self.choice(
            (self.unit, self.unit, self.gaussian, self.kernel, self.mixing, self.deep, self.wide)
        )()

    def skip(self):
        return MoreauSkip(self.simple(), self.choice((0.2, 0.6, 1.0)))

    def hidden(self):
        return HiddenReadout(self.choice((self.unit, self.mixing, self.deep, self.branches))())

    def affine(self):
        left, values, right = torch.linalg.svd(torch.randn(4, 4))
        if self.random() < 0.5:
            values = torch.ones(4) * self.choice((0.5, 1.0))
        return AffineChange(self.simple(), left @ torch.diag(values + 0.05) @ right, torch.randn(4))

    def deep(self):
        units = [self.unit() for _ in range(self.randint(1, 3))]
        return DeepOptEq(units, self.choice((0.4, 0.8, 1.0)))

    def wide(self):
        return WideOptEq([self.unit() for _ in range(self.randint(1, 3))])

    def blocks(self):
        return MultiBlockOptEq(self.deep())

    def regularised(self):
        regulariser, gamma, form = self.choice(
            (
                (SquaredNorm(), 0.4, "gradient"),
                (SquaredNorm(), 1.6, "gradient"),
                (SquaredNorm(), 0.4, "prox"),
                (AbsoluteNorm(), 0.05, "prox"),
                (Incay(), 0.05, "gradient"),
            )
        )
        return Regularised(self.simple(), regulariser, gamma, form)

    def parallel(self):
        return Parallel([self.choice((self.simple, self.skip))() for _ in range(self.randint(1, 3))])

    def halved(self, outputs):
        """`U` of a branch at half the resolution."""
        return Compose(AveragePool(INPUT, 2), Conv2d(INPUT, outputs))

    def branches(self):
        units = [self.unit(3) for _ in range(self.randint(2, 3))]
        if self.image and self.random() < 0.5:
            hidden = self.size()
            units[-1] = OptEqUnit(Conv2d(3, hidden), self.halved(hidden), max_norm=self.max_norm())
        options = {"weight": self.choice((0.01, 0.2)), "tau": self.choice((0.01, 0.3))}
        return MOptEq(units, HeritageDiversity(**options), self.choice(("jacobi", "gauss-seidel")))

    def kernel_branches(self):
        units = [self.kernel(self.size(), 3) for _ in range(2)]
        return KernelMOptEq(units, HeritageDiversity(self.choice((0.01, 0.1)), tau=0.2))

    def map(self):
        kinds = (
            self.unit,
            self.gaussian,
            self.kernel,
            self.mixing,
            self.hidden,
            self.skip,
            self.affine,
            self.deep,
            self.wide,
        )
        kinds += (self.blocks, self.regularised, self.parallel, self.branches, self.kernel_branches)
        kind = self.choice(kinds)
        made = kind()
        with torch.no_grad():
            for operator in made.modules():
                if isinstance(operator, LinearOperator) and "weight" in operator._parameters:
                    operator.weight.mul_(self.choice((0.3, 1.0, 1.0, 10.0)))
            for name, parameter in made.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        return kind.__name__, made

    def inputs(self, count, dtype=torch.float64):
        shape = (INPUT, *SIDES) if self.image else (INPUT,)
        return self.choice((0.1, 1.0, 5.0)) * torch.randn(count, *shape, dtype=dtype)


class Loud(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


class LoudDense(Dense):
    def forward(self, x, error=0.0):
        return 3 * super().forward(x, error)


class LoudUnit(OptEqUnit):
    def bind(self, x, error=0.0):
        return super().bind(3 * x, error)


class Named(Dense):
    """Changes nothing."""


class Doubled(Dense):
    """Acts with other weights than it holds."""

    @property
    def weights(self):
        return tuple(2 * w for w in super().weights)


def dress(draw, module):
    """Something that users do to parts; its name."""
    operators = [m for m in module.modules() if isinstance(m, LinearOperator) and "weight" in m._parameters]
    operator = draw.choice(operators)
    match draw.choice(
        ("bare", "bare", "hook", "pre-hook", "parametrized", "normalised", "pruned", "subclass")
    ):
        case "hook":
            draw.choice([operator, module]).register_forward_hook(tripled)
            return "hook"
        case "pre-hook":
            operator.register_forward_pre_hook(tripled_input)
            return "pre-hook"
        case "parametrized":
            parametrize.register_parametrization(operator, "weight", Loud())
            return "parametrized"
        case "normalised":
            parametrizations.weight_norm(operator)
            return "parametrized"
        case "pruned":
            prune.random_unstructured(operator, "weight", 0.3)
            return "pruned"
        case "subclass":
            dense = [m for m in operators if type(m) is Dense]
            units = [m for m in module.modules() if type(m) is OptEqUnit]
            if dense and draw.random() < 0.7:
                draw.choice(dense).__class__ = draw.choice((LoudDense, Named, Doubled))
            elif units:
                draw.choice(units).__class__ = LoudUnit
            return "subclass"
    return "bare"


def tripled(module, args, output):
    return tuple(3 * t for t in output) if isinstance(output, tuple) else 3 * output


def tripled_input(module, args):
    return (3 * args[0],) if args else None


def joined(state):
    return torch.cat([z.flatten(1) for z in tensors_of(state)], 1)


def drawn(seed):
    """The same map for the same seed, with its kind and its clothes, and what draws inputs for it."""
    draw = Draw(seed)
    kind, module = draw.map()
    return draw, module.eval(), (kind, dress(draw, module))


def exact(seed):
    """The layer of a map in float64, solved tightly, and what draws inputs for it."""
    draw, module, _ = drawn(seed)
    return draw, tightly_solved(module.double())


def tightly_solved(module):
    """The layer of a map in float64."""
    solver = Anderson(1e-11, 1500, damping=0.6)
    return EquilibriumLayer(module, solver, Implicit(1e-10, 500), "raise").eval()


def expect_distance(seed):
    """Compares `certify` with the equilibrium in float64."""
    draw, module, _ = drawn(seed)
    dtype = draw.choice((torch.float32, torch.float64))
    tolerance = draw.choice((1e-1, 1e-2, 1e-4, 4e-6) if dtype is torch.float32 else (1e-2, 1e-5, 1e-9))
    solver = Anderson(tolerance, draw.choice((2, 200)), damping=draw.choice((0.6, 1.0)))
    layer = EquilibriumLayer(module.to(dtype), solver, on_unconverged="count").eval()
    x = draw.inputs(3, dtype)
    certificate = certify(layer, x)
    equation = drawn(seed)[1].double().bind(x.double()).detach()
    found, info = solve_fixed_point(equation, equation.initial(), Anderson(1e-13, 3000, damping=0.6))
    z = certificate.state
    z = tuple(t.double() for t in z) if isinstance(z, tuple) else z.double()
    distance = (joined(equation.readout(z)) - joined(equation.readout(found))).norm(dim=1)
    # The equilibrium itself is known to its residual.
    slack = 1e-11 * joined(equation.readout(found)).norm(dim=1)
    broken = info.converged & (distance - slack > certificate.distance.value)
    if broken.any():
        worst = (distance / certificate.distance.value)[broken].max().item()
        raise AssertionError(f"distance of {dtype} at tol={tolerance:g}: {worst:.6g} times its bound")
    return "distance" if torch.isfinite(certificate.distance.value).any() else "no distance"


def jacobian(layer, x):
    """That of `x ↦ z*` at one input, from one solve for a batch with a row for each output."""
    with torch.no_grad():
        count = joined(layer(x)).shape[1]
    rows = x.expand(count, *x.shape[1:]).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(joined(layer(rows)).diagonal().sum(), rows)
    return gradient.flatten(1)


def steepest(draw, layer, steps=4):
    """The largest local constants, and ratios of pairs of inputs, that gradient ascent finds."""
    best = 0.0
    for x in draw.inputs(2).split(1):
        _, values, right = torch.linalg.svd(jacobian(layer, x), full_matrices=False)
        best = max(best, values[0].item())
        pair = torch.cat([x, x + 10 ** draw.uniform(-4, 0) * right[0].view_as(x)]).requires_grad_()
        for _ in range(steps):
            z = joined(layer(pair))
            ratio = (z[0] - z[1]).norm() / (pair[0] - pair[1]).norm()
            best = max(best, ratio.item())
            (slope,) = torch.autograd.grad(ratio, pair)
            move = 0.3 * (pair[0] - pair[1]).detach().norm() / slope.norm().clamp(min=1e-30)
            pair = (pair + move * slope).detach().requires_grad_()
    return best


class Acting(NormControl):
    """The weights that acted once."""

    def __init__(self, control):
        self.control, self.weights = control, None

    def weight(self, operator):
        return self.control.weight(operator) if self.weights is None else self.weights[0]

    def scaled(self, weights, ceiling, norm):
        if self.weights is None:
            self.weights = tuple(w.detach() for w in self.control.scaled(weights, ceiling, norm))
        return self.weights

    def widen(self):
        if self.weights is not None:
            self.weights = tuple(w.double() for w in self.weights)


def acting(module, x):
    """A map in double precision with the weights that act in float32: certified ways leave room to round.

    None where these cannot be held, as those of an operator that acts in two places, and differently.
    """
    bound = module.bind(x.float())
    operators = [operator for operator in module.modules() if isinstance(operator, LinearOperator)]
    for operator in operators:
        operator.norm_control = Acting(operator.norm_control)
    module.bind(x.float())
    # Only now: an operator may be a factor of another one as well.
    for operator in operators:
        operator.norm_control.widen()
    again = module.double().bind(x)
    same = zip(bound.tensors, again.tensors, strict=True)
    return module if all(torch.allclose(a.double(), b, rtol=1e-4, atol=1e-5) for a, b in same) else None


def expect_lipschitz(seed):
    """Compares `equilibrium_lipschitz` with gradient ascent, for every fourth layer in float32 as well."""
    draw, layer = exact(seed)
    x = draw.inputs(1)
    bound = equilibrium_lipschitz(layer.map, x).value.item()
    found = steepest(draw, layer)
    # To the precision of the solves.
    if found > bound * (1 + 1e-7) + 1e-7:
        raise AssertionError(f"Lipschitz bound {bound:.6g}, found {found:.6g}")
    if seed % 4 == 3:
        bound = equilibrium_lipschitz(drawn(seed)[1], x.float()).value.item()
        module = acting(drawn(seed)[1], x)
        if module is None:
            return "lipschitz, not in float32"
        found = steepest(draw, tightly_solved(module))
        if found > bound * (1 + 1e-6) + 1e-6:
            raise AssertionError(f"Lipschitz bound {bound:.6g} in float32, found {found:.6g}")
    return "lipschitz"


def expect_radius(seed):
    """Attacks a classifier, by gradients, from just inside the radius around its inputs."""
    draw, layer = exact(seed)
    if isinstance(layer(draw.inputs(1)), tuple):
        return "several states"
    head = nn.Linear(joined(layer(draw.inputs(1))).shape[1], 3).double()
    if draw.random() < 0.3:
        parametrizations.weight_norm(head)
    classifier = nn.Sequential(layer, nn.Flatten(), head).eval()
    if draw.random() < 0.1:
        head.register_forward_hook(tripled)
    x = draw.inputs(3)
    radius = robust_radius(classifier, x)
    predicted = classifier(x).argmax(1)
    unit = (1 - 1e-6) * radius.clamp(max=1e6).view(-1, *[1] * (x.dim() - 1))
    for other in (1, 2):
        moved = x
        for _ in range(3):
            moved = moved.detach().requires_grad_()
            logits = classifier(moved)
            margin = logits.gather(1, (predicted[:, None] + other) % 3) - logits.gather(1, predicted[:, None])
            (slope,) = torch.autograd.grad(margin.sum(), moved)
            length = slope.flatten(1).norm(dim=1).view_as(unit).clamp(min=1e-30)
            moved = x + unit * slope / length
            if (classifier(moved).argmax(1) != predicted).any():
                raise AssertionError("an attack inside the robust radius changes the prediction")
    return "radius"


CHECKS = (expect_distance, expect_lipschitz, expect_radius)


def attack(count, seed):
    """Attack `count` random layers; returns how often what was found, and the violations."""
    outcomes, violations = Counter(), []
    for number in range(seed, seed + count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, clothes = drawn(number)[2]
            for check in CHECKS:
                try:
                    outcomes[check(number)] += 1
                except (ConfigError, ConvergenceError) as error:
                    outcomes[f"{check.__name__}: {type(error).__name__}"] += 1
                except Exception as error:
                    violations.append(f"{number} {kind} {clothes}: {type(error).__name__} {error}")
        outcomes[kind] += 1
        outcomes[clothes] += 1
    return outcomes, violations


if __name__ == "__main__":
    start, first, last = time.monotonic(), int(sys.argv[2]) if sys.argv[2:] else 0, int(sys.argv[1])
    outcomes, broken = Counter(), []
    for done in range(0, last, AT_A_TIME):
        counts, wrong = attack(min(AT_A_TIME, last - done), first + done)
        outcomes += counts
        broken += wrong
        seconds = time.monotonic() - start
        print(
            f"{done + AT_A_TIME} layers, {len(broken)} violations, {seconds:.0f} s",
            *wrong,
            sep="\n",
            flush=True,
        )
    print(*sorted(outcomes.items()), *broken, sep="\n")
