"""Every way of keeping the norm keeps what it promises. A new one joins by an entry in `WAYS`."""

import copy
import pickle
import random as numbers
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import SGD

from opteq import (
    AlmostOrthogonal,
    Ceiling,
    Compose,
    Conv2d,
    Dense,
    DepthwiseSeparableConv2d,
    EquilibriumLayer,
    GaussianStart,
    OptEqUnit,
    Orthogonal,
    OrthogonalStart,
    ShiftIsometry,
    Unconstrained,
    UniformStart,
    WeightNormalised,
    certify,
    settle_norms,
)
from opteq.errors import ConfigError
from opteq.operators.base import LinearOperator
from opteq.operators.norms.base import NormControl
from tests.conformance.reference import dense, matrix_of, random, spectral_norm

WAYS: list[NormControl] = [
    Ceiling(),
    AlmostOrthogonal(),
    Orthogonal(),
    ShiftIsometry(),
    WeightNormalised(),
    Unconstrained(),
]
CERTIFIED = [way for way in WAYS if way.certified]
every_way = pytest.mark.parametrize("way", WAYS, ids=repr)
every_certified_way = pytest.mark.parametrize("way", CERTIFIED, ids=repr)
CASES = 200


def drawn(seed: int, way: NormControl) -> tuple[LinearOperator, tuple[int, ...]]:
    """An operator of random kind, shape and weights, and the shape of its inputs."""
    draw = numbers.Random(seed)
    torch.manual_seed(seed)
    start = draw.choice([UniformStart(), OrthogonalStart(), GaussianStart(draw.choice([1e-3, 0.3, 5.0]))])
    kind = draw.choice(["dense", "conv", "grouped", "separable"])
    a, b, k = draw.randint(1, 6), draw.randint(1, 6), draw.choice([1, 3, 5])
    sides = draw.randint(1, 6), draw.randint(1, 6)
    if kind == "dense":
        return Dense(a, b, norm=way, start=start), (a,)
    if kind == "separable" and not isinstance(way, Orthogonal | ShiftIsometry):
        return DepthwiseSeparableConv2d(a, b, k, norm=way, start=start), (a, *sides)
    groups = draw.randint(2, 3) if kind == "grouped" else 1
    # Those of one channel to a group are refused, coming in or going out.
    a = max(a, 2) if isinstance(way, Orthogonal) else a
    b = max(b, 2) if isinstance(way, ShiftIsometry) else b
    return Conv2d(groups * a, groups * b, k, groups, norm=way, start=start), (groups * a, *sides)


def disturbed(operator: LinearOperator, seed: int) -> LinearOperator:
    """The operator after what a training might do to its parameters."""
    with torch.no_grad():
        for number, parameter in enumerate(operator.parameters()):
            noise = random(*parameter.shape, seed=seed + number).to(parameter.dtype)
            parameter.add_(noise * 10.0 ** (seed % 5 - 3))
    return operator


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.spec("R1.7")
def test_the_norm_never_exceeds_its_bound(way: NormControl, dtype: torch.dtype):
    for seed in range(CASES):
        operator, domain = drawn(seed, way)
        operator = disturbed(operator.to(dtype), seed).eval()
        ceiling = [None, 0.5, 0.97, 3.0][seed % 4]
        bound = operator.bind(domain, ceiling)
        norm = spectral_norm(dense(bound)).item()
        assert norm <= bound.norm_bound().item(), seed
        if way.certified:
            assert norm <= way.kept(ceiling), seed
            assert bound.norm_bound().item() == way.kept(ceiling)
        elif ceiling is not None and way.kept(ceiling) == ceiling:
            # The estimate of a norm is from below.
            assert norm <= ceiling * (1 + 1e-3), seed


@every_certified_way
@pytest.mark.spec("R1.7")
def test_a_certified_way_estimates_no_norm(way: NormControl, monkeypatch: pytest.MonkeyPatch):
    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a norm was estimated")

    monkeypatch.setattr("opteq.operators.estimate.largest_ritz_pair", refused)
    monkeypatch.setattr("opteq.operators.bound.dense_norm_bound", refused)
    W = Conv2d(4, 6, norm=way)
    layer = EquilibriumLayer(OptEqUnit(W, Conv2d(3, 6)))
    x = random(2, 3, 5, 5, dtype=torch.float32)
    layer(x).sum().backward()
    certificate = certify(layer, x)
    assert (certificate.contraction.value == 0.97**2).all()
    assert (certificate.distance.value >= certificate.distance_to_reference.value * (1 - 1e-6)).all()


@every_way
@pytest.mark.parametrize("build", [lambda **o: Dense(5, 3, **o), lambda **o: Conv2d(4, 6, groups=2, **o)])
def test_gradients_to_the_parameters_are_those_of_finite_differences(way: NormControl, build):
    torch.manual_seed(0)
    operator = build(norm=way).double().eval()
    domain = (5,) if isinstance(operator, Dense) else (4, 3, 3)
    x, cotangent = random(2, *domain), random(2, *operator.bind(domain).codomain, seed=1)
    ceiling = None if isinstance(way, Ceiling) else 0.7

    def value() -> Tensor:
        return (operator.bind(domain, ceiling)(x) * cotangent).sum()

    names, parameters = zip(*operator.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value(), parameters)
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        direction, values = random(*parameter.shape, seed=2), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * direction)
            values.append(value().detach())
            with torch.no_grad():
                parameter.sub_(sign * 1e-6 * direction)
        expected = (values[0] - values[1]) / 2e-6
        torch.testing.assert_close(
            (gradient * direction).sum(),
            expected,
            rtol=1e-5,
            atol=1e-7,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@every_way
def test_copies(way: NormControl, tmp_path: Path):
    torch.manual_seed(0)
    operator = Conv2d(4, 6, norm=way)
    loaded = Conv2d(4, 6, norm=way)
    loaded.load_state_dict(operator.state_dict())
    x = random(2, 4, 3, 3, dtype=torch.float32)
    written = Conv2d(4, 6, norm=way)
    save_file(operator.state_dict(), tmp_path / "operator.safetensors")
    written.load_state_dict(load_file(tmp_path / "operator.safetensors"))
    for other in (copy.deepcopy(operator), pickle.loads(pickle.dumps(operator)), loaded, written):
        assert torch.equal(other(x), operator(x))


@every_way
def test_what_is_known_of_norms_is_not_stored(way: NormControl):
    torch.manual_seed(0)
    operator = Conv2d(4, 6, norm=way).eval()
    size = len(pickle.dumps(operator))
    bound = operator.bind((4, 5, 5), 0.9)
    assert bound.norm_bound() > 0
    assert len(pickle.dumps(operator)) == size


def test_weights_for_which_there_is_no_memory_are_refused():
    with pytest.raises(ConfigError, match=r"a weight of shape \(1048576, 4194304\); choose smaller sizes"):
        Dense(2**22, 2**20)


@every_way
def test_memory_formats_change_nothing(way: NormControl):
    torch.manual_seed(0)
    operator, x = Conv2d(4, 6, groups=2, norm=way).eval(), torch.randn(2, 4, 5, 5)
    expected = operator.bind((4, 5, 5), 0.9)(x)
    moved = operator.to(memory_format=torch.channels_last)
    torch.testing.assert_close(moved.bind((4, 5, 5), 0.9)(x), expected, rtol=1e-5, atol=1e-5)


def share(kernel: torch.Tensor) -> float:
    """What is left of a norm of 1 for the rounding in float32 of sums of so many terms."""
    return 1 - 4 * (kernel.numel() // min(kernel.shape[:2])) * 2**-23


@every_certified_way
@pytest.mark.spec("R1.7")
def test_a_network_in_float64_is_the_network(way: NormControl):
    torch.manual_seed(0)
    for operator in (Dense(40, 60, norm=way), Conv2d(32, 64, norm=way)):
        (single,) = operator.weights
        (double,) = copy.deepcopy(operator).double().weights
        torch.testing.assert_close(single.double(), double, rtol=0, atol=4e-7)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("channels", [(4, 7), (5, 5), (6, 4), (8, 30)], ids=str)
@pytest.mark.parametrize("way", [Orthogonal(), ShiftIsometry()], ids=repr)
def test_orthogonal_convolutions_keep_lengths_on_a_torus(
    way: NormControl, size: int, channels: tuple[int, int]
):
    torch.manual_seed(0)
    inside, out = channels
    operator = disturbed(Conv2d(inside, out, size, norm=way).double(), 3)
    (kernel,) = operator.weights
    transform = torch.fft.fft2(kernel, s=(9, 9)).permute(2, 3, 0, 1)
    values = torch.linalg.svdvals(transform)
    torch.testing.assert_close(values, torch.full_like(values, share(kernel)), rtol=1e-9, atol=1e-9)
    used = min(out, size**2) if isinstance(way, ShiftIsometry) else size**2
    assert (kernel.abs().amax((0, 1)) > 1e-3).sum() == used


@pytest.mark.spec("R1.7")
def test_a_shift_isometry_moves_by_the_nearest_offsets_first():
    torch.manual_seed(0)
    for channels, farthest in ((2, 1), (5, 1), (9, 2), (13, 4), (25, 8)):
        (kernel,) = Conv2d(channels, channels, 5, norm=ShiftIsometry()).weights
        rows, columns = (kernel.abs().amax((0, 1)) > 1e-3).nonzero(as_tuple=True)
        assert len(rows) == channels
        assert ((rows - 2) ** 2 + (columns - 2) ** 2).max() == farthest


@pytest.mark.parametrize("way", [Orthogonal(), AlmostOrthogonal()], ids=repr)
def test_an_orthogonal_start_is_left_alone(way: NormControl):
    torch.manual_seed(0)
    operator = Conv2d(3, 5, 3, norm=way, start=OrthogonalStart()).double()
    (kernel,) = operator.weights
    middle = kernel[:, :, 1, 1]
    torch.testing.assert_close(middle.mT @ middle, torch.eye(3, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    rest = kernel.clone()
    rest[:, :, 1, 1] = 0
    assert rest.abs().max() < 1e-6


def correlations(kernel: np.ndarray) -> np.ndarray:
    """`Σ_{c',s} |(P ⋆ P)_{c,c',s}|` of a kernel `(out, in, k, k)`, written out."""
    _, channels, k, _ = kernel.shape
    padded = np.pad(kernel, ((0, 0), (0, 0), (k - 1, k - 1), (k - 1, k - 1)))
    sums = np.zeros(channels)
    for c in range(channels):
        for other in range(channels):
            for i in range(2 * k - 1):
                for j in range(2 * k - 1):
                    sums[c] += abs((kernel[:, c] * padded[:, other, i : i + k, j : j + k]).sum())
    return sums


@pytest.mark.parametrize(("shape", "groups"), [((4, 3), 1), ((4, 3, 3, 3), 1), ((6, 2, 3, 3), 2)], ids=str)
@pytest.mark.spec("R1.7")
def test_almost_orthogonal_weights_are_those_of_the_formula(shape: tuple[int, ...], groups: int):
    torch.manual_seed(0)
    out, inside, k = shape[0], shape[1], shape[-1] if len(shape) == 4 else 1
    operator = Dense(inside, out, norm=AlmostOrthogonal()) if len(shape) == 2 else None
    operator = operator or Conv2d(groups * inside, out, k, groups, norm=AlmostOrthogonal())
    with torch.no_grad():
        operator.double().weight.copy_(random(*shape))
        operator.weight[:, 1] = 0  # nothing of this channel
    expected = operator.weight.detach().numpy().reshape(groups, out // groups, inside, k, k).copy()
    for part in expected:
        sums = correlations(part)
        part /= np.sqrt(np.where(sums > 0, sums, 1))[:, None, None]
    (found,) = operator.weights
    expected = share(found) * expected.reshape(shape)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "way", [AlmostOrthogonal(), Orthogonal(), ShiftIsometry(), WeightNormalised()], ids=repr
)
@pytest.mark.parametrize("make", [lambda way: Dense(4, 5, norm=way), lambda way: Conv2d(4, 4, norm=way)])
@pytest.mark.spec("R1.7")
def test_the_size_of_stored_weights_does_not_count_where_something_else_says_it(way, make):
    """Their squares, and of the largest the norms, are beyond float32."""
    torch.manual_seed(0)
    operator = make(way)
    stored, (expected,) = operator.weight.detach().clone(), operator.weights
    for size in (2.0**-100, 2.0**100, 3e38 / stored.abs().max().item()):
        with torch.no_grad():
            operator.weight.copy_(size * stored.double())
        (found,) = operator.weights
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        if not way.certified:
            continue
        domain = (4,) if len(operator.sides) == 0 else (4, 3, 4)
        assert spectral_norm(matrix_of(operator.double(), domain)).item() <= 1
        operator.float()


def test_starts():
    torch.manual_seed(0)
    assert abs(Dense(300, 200, start=GaussianStart(0.2)).weight.std().item() - 0.2) < 0.01
    start = Conv2d(6, 4, groups=2, start=OrthogonalStart(gain=2.0)).double()
    singular = torch.linalg.svdvals(matrix_of(start, (6, 3, 3)))
    torch.testing.assert_close(singular, torch.full_like(singular, 2.0), rtol=1e-6, atol=1e-6)
    for weight in DepthwiseSeparableConv2d(2, 3, start=GaussianStart(0.0)).weights:
        assert not weight.any()
    reference = torch.nn.Conv2d(6, 4, 3)
    assert abs(Conv2d(60, 40).weight.abs().max().item() - 1 / (60 * 9) ** 0.5) < 1e-3
    assert reference.weight.shape == Conv2d(6, 4).weight.shape
    with pytest.raises(ConfigError, match="Expected `start`"):
        Dense(2, 2, start="orthogonal")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Expected `norm`"):
        Dense(2, 2, norm="ceiling")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`std` of GaussianStart"):
        GaussianStart(-1.0)
    with pytest.raises(ConfigError, match="can only be a shift"):
        Conv2d(3, 3, groups=3, norm=Orthogonal())
    with pytest.raises(ConfigError, match="moves nothing; use another `norm`"):
        Conv2d(6, 3, groups=3, norm=ShiftIsometry())
    with pytest.raises(ConfigError, match="needs a start of full rank"):
        Dense(3, 3, norm=ShiftIsometry(), start=GaussianStart(0.0))


def test_the_stored_norm_stays_near_the_ceiling_and_the_function_what_it_is():
    torch.manual_seed(0)
    W = Conv2d(3, 5)
    layer = EquilibriumLayer(OptEqUnit(W, Conv2d(2, 5)))
    x, target = random(8, 2, 4, 4, dtype=torch.float32), random(8, 3, 4, 4, seed=1, dtype=torch.float32)
    optimizer = SGD(layer.parameters(), lr=0.02)
    settled = 0
    for _ in range(40):
        before = W.weight.detach().clone()
        with torch.no_grad():
            expected = copy.deepcopy(layer).eval()(x)
        settle_norms(layer)
        assert spectral_norm(matrix_of(copy.deepcopy(W).double(), (3, 4, 4))).item() < 2 * 0.97
        z = layer(x)
        if not torch.equal(before, W.weight):
            settled += 1
            torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)
        optimizer.zero_grad()
        (z - target).square().mean().backward()
        optimizer.step()
        with torch.no_grad():  # a long training in few steps: alone, the weight would grow 45-fold
            W.weight.mul_(1.1)
    assert settled > 5


def test_weights_that_a_graph_holds_or_others_share_are_not_scaled():
    torch.manual_seed(0)
    W = Conv2d(3, 3)
    with torch.no_grad():
        W.weight.mul_(20)
    layer = EquilibriumLayer(OptEqUnit(W, Conv2d(3, 3)))
    x = random(2, 3, 4, 4, dtype=torch.float32)
    before = W.weight.detach().clone()
    z = layer(x)
    settle_norms(layer)  # the graph of `z` holds the weight
    z.sum().backward()
    assert torch.equal(W.weight, before)
    tied = EquilibriumLayer(OptEqUnit(W, W))
    for _ in range(3):
        settle_norms(tied)
        tied(x)
        with torch.no_grad():
            W.weight.mul_(1.001)
    torch.testing.assert_close(W.weight.detach(), before * 1.001**3)


@pytest.mark.parametrize("gain", [0.0, 0.5, 4.0])
def test_a_filter_of_zeros_has_a_finite_gradient(gain: float):
    torch.manual_seed(0)
    operator = Conv2d(3, 4, norm=WeightNormalised())
    with torch.no_grad():
        operator.weight[1] = 0
        operator.gain[1] = gain
        operator.weight[2] *= 1e-18  # whose squares float32 still has
    (weight,) = operator.weights
    assert not weight[1].any()
    lengths = weight.flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths[[0, 2, 3]], operator.gain.flatten()[[0, 2, 3]], rtol=1e-5, atol=0)
    cotangent = random(*weight.shape, dtype=torch.float32)
    for gradient in torch.autograd.grad((weight * cotangent).sum(), tuple(operator.parameters())):
        assert torch.isfinite(gradient).all()


def test_a_way_for_single_weights_is_refused_for_a_product():
    for way in (AlmostOrthogonal(), Orthogonal(), WeightNormalised()):
        with pytest.raises(ConfigError, match="keeps the norm of one weight; give it to the factors"):
            Compose(Conv2d(3, 3), Conv2d(3, 3), norm=way)


@pytest.mark.parametrize("way", [Orthogonal(), AlmostOrthogonal()], ids=repr)
def test_a_promise_holds_under_autocast_and_is_not_made_in_half_precision(way: NormControl):
    torch.manual_seed(0)
    operator = Dense(12, 8, norm=way)
    with torch.autocast("cpu", torch.bfloat16):
        bound = operator.bind((12,), 0.97)
        assert spectral_norm(dense(bound).double()).item() <= 0.97
    rounded = operator.bfloat16().bind((12,), 0.97)
    assert spectral_norm(dense(rounded).double()).item() <= rounded.norm_bound().item()


def test_overridden_weights_are_not_trusted_with_a_promise():
    class Doubled(Dense):
        @property
        def weights(self) -> tuple[Tensor, ...]:
            return tuple(2 * w for w in super().weights)

    operator = Doubled(5, 5, norm=Orthogonal()).double()
    bound = operator.bind((5,), 0.97)
    assert spectral_norm(dense(bound)).item() <= bound.norm_bound().item()


def test_an_orthogonal_start_without_full_rank_is_refused():
    with pytest.raises(ConfigError, match="rank"):
        Dense(4, 4, norm=Orthogonal(), start=GaussianStart(0.0))


@every_way
@pytest.mark.parametrize("ceiling", [0.9, 2.0])
def test_the_norm_is_that_of_what_acts_under_a_ceiling(way, ceiling):
    torch.manual_seed(0)
    operator = Dense(6, 6, norm=way).double().eval()
    bound = operator.bind((6,), ceiling)
    acting = torch.linalg.matrix_norm(bound(torch.eye(6, dtype=torch.float64)), 2)
    torch.testing.assert_close(operator.norm((6,), ceiling), acting, rtol=1e-3, atol=0)
