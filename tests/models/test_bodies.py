"""Bodies: the published sizes, that they train in every mode, and that they tell what is wrong."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opteq import (
    HSIC,
    SAM,
    Anderson,
    Decorrelation,
    HeritageDiversity,
    Implicit,
    Parallel,
    Phantom,
    Picard,
    RandomFeatureHSIC,
    SquaredNorm,
    Unrolled,
    solve_log,
)
from opteq.errors import ConfigError, ShapeError
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqUnit
from opteq.models.baselines.feedforward import FeedForward
from opteq.models.bodies import Coupled, Deep, Equilibrium, Gaussian, Kernel, Stack, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head, ResNetHead
from opteq.models.stems import ConvStem, PooledStem, ResNetStem
from tests.networks import branch_classifier, count

AVERAGED = {"fusion": "average", "pool": 1}
SIX = {"reductions": (1, 2, 4, 4, 8, 8), **AVERAGED}
SINGLE = {"channels": 32, "hidden": (64, 128, 128), "reductions": (1, 1, 1), "widths": (16,)}
GEQ5, GEQ8 = (64, 128, 128, 128, 256, 256), (80, 160, 160, 160, 320, 320)
LARGE = (48, 96, 192, 192, 384, 384)


def four(channels):
    hidden = tuple(channels // n for n in (8, 4, 2, 2))
    return {"channels": channels, "hidden": hidden, "widths": (channels // 2,), **AVERAGED}


def six(channels, hidden, depth=1, **options):
    return {"channels": channels, "hidden": hidden, "widths": (channels,) * depth, **SIX, **options}


def expected_count(channels, hidden, stem, head, projections=0):
    """Kernels `W` and `U`, stem with batch norm, head with bias, and the patch projections."""
    widths = (3, *stem, channels)
    units = 2 * 9 * channels * sum(hidden)
    convolutions = sum(9 * a * b + 2 * b for a, b in pairwise(widths))
    return units + convolutions + head[0] * head[1] + head[1] + projections


WIDE = {"downsamplings": 2, "patch_hidden": 128, "classes": 100}
PUBLISHED = {
    # What the papers print, in thousands, and what the shapes give. Ten classes unless said.
    "single": (Coupled, SINGLE, 193, 193_306),
    "single-sum": (Unit, {**SINGLE, "fusion": "sum"}, 193, 193_306),
    "single-conv": (Unit, {**SINGLE, "fusion": "conv"}, 276, 276_250),
    "single-bias": (Unit, {**SINGLE, "bias": True}, 193.6, 193_626),
    "single-sigmoid": (Coupled, {**SINGLE, "kernel": "sigmoid"}, 193, 193_306),
    "four-128": (Coupled, four(128), 480, 482_634),
    "four-256": (Coupled, four(256), 1900, 1_923_722),
    "six-320": (Coupled, six(320, GEQ8), 8100, 7_846_730),
    "six-320-polynomial-100": (Coupled, six(320, GEQ8, kernel="polynomial", classes=100), 8000, 7_875_620),
    "six-320-deep-stem": (Coupled, six(320, GEQ8, depth=3), 10_000, 9_691_210),
    "imagenet": (Coupled, six(384, LARGE, depth=3, classes=1000), 13_000, 13_337_704),
    "geq-256": (Gaussian, six(256, GEQ5), 5000, 5_036_298),
    "geq-256-100": (Gaussian, six(256, GEQ5, classes=100), 5000, 5_059_428),
    "geq-320": (Gaussian, six(320, GEQ8), 8000, 7_859_018),
    "geq-320-100": (Gaussian, six(320, GEQ8, classes=100), 8000, 7_887_908),
    "geq-imagenet100": (Gaussian, six(256, (32, 64, 128, 128, 256, 256), 3, **WIDE), 6000, 5_810_020),
    "geq-imagenet100-large": (Gaussian, six(384, LARGE, 3, **WIDE), 13_000, 13_015_780),
}


@pytest.mark.spec("R5.6", "R6.6")
@pytest.mark.parametrize(("body", "options", "printed", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_shapes_have_the_published_sizes(body, options, printed, parameters):
    with torch.device("meta"):
        network = branch_classifier(body, **options)
    assert count(network) == parameters
    assert abs(parameters / 1000 - printed) / printed < 0.05


@pytest.mark.spec("R5.6", "R6.6")
def test_the_sizes_follow_from_the_shapes():
    single = expected_count(32, (64, 128, 128), (16,), (3 * 32 * 4, 10))
    assert single == 193_306
    assert count(branch_classifier(Unit, **SINGLE, fusion="conv")) - single == 9 * 9 * 32 * 32 == 82_944
    assert count(branch_classifier(Unit, **SINGLE, bias=True)) - single == 64 + 128 + 128
    assert expected_count(256, (32, 64, 128, 128), (128,), (256, 10)) == 1_923_722
    assert expected_count(256, GEQ5, (256,), (256, 100), 6 * 32 * 64) == 5_059_428
    assert expected_count(384, LARGE, (384,) * 3, (384, 100), 6 * 32 * 128) == 13_015_780


def deep_classifier(channels=30, factor=1, classes=10, **options):
    """As Xie et al. 2022, §7: biases everywhere and no normalisation."""
    body = Deep(channels, **options)
    return ImageClassifier(PooledStem(3, channels, factor), body, Head(channels, classes, norm=False))


@pytest.mark.spec("R2.1")
@pytest.mark.parametrize(
    ("hidden", "expected", "printed"),
    [((16, 32, 64, 128, 128), 200_238, 199_000), ((16, 32, 64, 64, 128), 165_614, 162_000)],
)
def test_the_deep_presets_have_the_published_sizes(hidden, expected, printed):
    network = deep_classifier(hidden=hidden)
    assert count(network) == expected
    assert abs(expected - printed) / printed < 0.03
    # From the shapes: W and U with bias per unit, one convolution as the stem, ten classes.
    kernels = sum(2 * 30 * n * 9 + n for n in hidden)
    assert expected == kernels + (3 * 30 * 9 + 30) + (30 * 10 + 10)
    assert count(deep_classifier(hidden=hidden, learn_alpha=True)) == expected + 5


def table6(backbone, operator, units, classes=1000, **options):
    body = Deep(512, [512] * units, operator=operator, **options)
    return ImageClassifier(ResNetStem(3, backbone), body, ResNetHead(512, classes))


@pytest.mark.spec("R2.7")
@pytest.mark.parametrize(
    ("backbone", "operator", "units", "parts"),
    [
        # Extractor, units and head. The paper prints 8 + 7 + 3 M and 24 + 13 + 3 M.
        ("resnet50", "separable", 5, (1_444_928, 2_670_080, 4_673_512)),
        ("wide_resnet50_2", "double-separable", 3, (4_126_528, 4_901_376, 4_673_512)),
    ],
)
def test_the_sizes_of_table_6(backbone, operator, units, parts):
    with torch.device("meta"):
        network = table6(backbone, operator, units)
    assert tuple(map(count, (network.stem, network.body, network.head))) == parts
    separable = {
        "separable": 512 * 9 + 512 * 512,
        "double-separable": 1024 * 25 + 1024 * 512 + 512 * 9 + 512 * 512,
    }[operator]
    assert parts[1] == units * (2 * separable + 512)


@pytest.mark.spec("R2.7")
def test_a_table_6_network_takes_a_training_step():
    torch.manual_seed(0)
    network = table6("resnet50", "separable", 5, classes=4, gradient=Unrolled(2))
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 4)
    F.cross_entropy(logits, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.spec("R5.1")
def test_branches_have_the_sizes_of_their_reductions():
    network = branch_classifier(channels=6, hidden=(4, 4, 4, 4), **AVERAGED)
    z = network.features(torch.randn(2, 3, 32, 32))
    assert [tuple(z_i.shape) for z_i in z] == [(2, 6, n, n) for n in (32, 16, 8, 4)]
    large = branch_classifier(channels=4, hidden=(4, 4), widths=(4,), downsamplings=2)
    z = large.features(torch.randn(1, 3, 256, 256))
    assert [tuple(z_i.shape) for z_i in z] == [(1, 4, 64, 64), (1, 4, 32, 32)]


def test_one_number_of_hidden_channels_is_one_state_and_a_list_is_branches():
    for body, kind in ((Unit, OptEqUnit), (Gaussian, GaussianMap)):
        assert type(body(4, 8).map) is kind
        branches = body(4, [8, 16]).map
        assert type(branches) is Parallel
        assert [branch.W.out_channels for branch in branches.maps] == [8, 16]


DEEP = {
    "implicit": {},
    "unrolled": {"gradient": Unrolled(5)},
    "sam": {"gradient": Unrolled(5, select=SAM(SquaredNorm()))},
    "sam-hsic": {"gradient": Unrolled(5, select=SAM(HSIC(), gamma=0.1, eta=0.3))},
    "regularised": {"regulariser": SquaredNorm(), "form": "prox"},
    "regularised-decorrelation": {
        "regulariser": Decorrelation(),
        "gamma": 1e-3,
        "gradient": Unrolled(5),
        "start": "input",
    },
    "regularised-implicit": {"regulariser": RandomFeatureHSIC(4), "gamma": 0.05},
    "learned-alpha": {"alpha": [0.8, 0.5, 0.3], "learn_alpha": True},
}
BRANCHES = {
    "popteq": (Unit, {}),
    "popteq-sum": (Unit, {"fusion": "sum"}),
    "popteq-conv": (Unit, {"fusion": "conv", "bias": True}),
    "mopteq": (Coupled, {"perturbation": 0.02}),
    "mopteq-gauss-seidel": (Coupled, {"perturbation": 0.0, "sweep": "gauss-seidel"}),
    "mopteq-unrolled": (Coupled, {"perturbation": 0.0, "gradient": Unrolled(6)}),
    "mopteq-polynomial": (Coupled, {"kernel": "polynomial", "perturbation": 0.02}),
    "mopteq-sigmoid": (Coupled, {"kernel": "sigmoid", "perturbation": 0.0, **AVERAGED}),
    "geq": (Gaussian, {"patch_hidden": 6, "gradient": Phantom(), **AVERAGED}),
    "kerdeq": (Gaussian, {"patch_hidden": 6, "gamma": 0.05}),
    "polynomial": (Kernel, {"kernel": "polynomial"}),
    "sigmoid": (Kernel, {"kernel": "sigmoid"}),
}


def learns(network, steps, share, every_parameter):
    """Trains on images whose brightness tells their class; in eval mode images do not see each other."""
    x, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    x += labels[:, None, None, None]
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    with solve_log(network) as log:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), labels)
            loss.backward()
            if every_parameter:
                assert all(p.grad is not None and p.grad.norm() > 0 for p in network.parameters())
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < share * losses[0]
    assert log.forward.unconverged == log.adjoint.unconverged == 0
    network.eval()
    with torch.no_grad():
        together = network(x)
        alone = torch.cat([network(image[None]) for image in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=3e-2)


@pytest.mark.spec("R3.1", "R3.2", "R3.5")
@pytest.mark.parametrize("options", DEEP.values(), ids=DEEP)
def test_deep_bodies_learn_in_every_training_mode(options):
    torch.manual_seed(0)
    learns(deep_classifier(6, 2, 3, hidden=(4, 8, 8), **options), 25, 0.8, every_parameter=False)


@pytest.mark.spec("R5.1", "R5.6", "R6.6")
@pytest.mark.parametrize(("body", "options"), BRANCHES.values(), ids=BRANCHES)
def test_bodies_of_branches_learn_and_reach_every_parameter(body, options):
    torch.manual_seed(0)
    learns(branch_classifier(body, classes=3, **options), 15, 0.7, every_parameter=True)


def test_a_stack_is_one_equilibrium_after_the_other():
    torch.manual_seed(0)
    first, second, x = Unit(4, 8), Unit(4, 6, solver=Picard()), torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(Stack([first, second])(x), second(first(x)))


@pytest.mark.spec("R3.5")
def test_the_training_mode_is_one_option():
    kinds = [(type(b.solver), type(b.gradient)) for b in (Unit(4), Unit(4, gradient=Unrolled(2)))]
    assert kinds == [(Anderson, Implicit), (type(None), Unrolled)]
    body = Equilibrium(OptEqUnit(Unit(4).map.W, Unit(4).map.injection.operator))
    assert (body.solver.tol, body.gradient.tol, body.on_unconverged) == (1e-3, 1e-3, "count")


@pytest.mark.spec("R5.4")
def test_perturbations_are_on_in_training_only():
    torch.manual_seed(0)
    calm, perturbed = (branch_classifier(Coupled, perturbation=size) for size in (0.0, 0.5))
    perturbed.load_state_dict(calm.state_dict())
    x = torch.randn(4, 3, 8, 8)
    assert not torch.allclose(calm.train()(x), perturbed.train()(x), atol=1e-3)
    torch.testing.assert_close(calm.eval()(x), perturbed.eval()(x))


@pytest.mark.spec("R5.5")
def test_the_default_ceiling_makes_the_equilibrium_unique():
    assert 0.85**2 * (1 + 0.01 * 31) < 1 < 0.9**2 * (1 + 0.01 * 31)
    assert Coupled(32).map.kept_unique
    assert not Coupled(32, max_norm=0.9).map.kept_unique
    assert 0.92**2 * (1 + 0.01 * 31 + 1) / 2 < 1 < 0.94**2 * (1 + 0.01 * 31 + 1) / 2
    for kernel in ("polynomial", "sigmoid"):
        assert Coupled(32, kernel=kernel, max_norm=0.92).map.kept_unique
        assert not Coupled(32, kernel=kernel, max_norm=0.94).map.kept_unique


@pytest.mark.spec("R7.8")
def test_the_feed_forward_body_is_equation_1_with_as_many_parameters():
    rival = ImageClassifier(PooledStem(3, 30), FeedForward(30), Head(80, 10, norm=False))
    assert abs(count(rival) - count(deep_classifier())) / count(rival) < 1e-3
    body, x = FeedForward(4, (5, 6, 7)), torch.randn(2, 4, 6, 6)
    z = torch.zeros(2, 1, 6, 6)
    recurrent = [torch.zeros(5, 1, 3, 3), *(layer.weight for layer in body.layers)]
    for W, U in zip(recurrent, body.inputs, strict=True):
        z = F.relu(F.conv2d(z, W, padding=1) + F.conv2d(x, U.weight, U.bias, padding=1))
    torch.testing.assert_close(body(x), z, rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r"per branch, got \[4, 4, 4\] and \(1, 2\)"):
        Unit(8, (4, 4, 4), reductions=(1, 2))
    with pytest.raises(ConfigError, match="at least one branch"):
        Unit(8, ())
    with pytest.raises(ConfigError, match="are those of branches; give `hidden` as a list, got 4"):
        Unit(8, 4, reductions=(1, 2))
    with pytest.raises(
        ConfigError, match=r"`channels` to be .*, got None, for none follows from the parts before"
    ):
        Unit(hidden=4)
    with pytest.raises(ConfigError, match=r"`factor` to be a whole number of at least 1, got 1\.5"):
        Unit(8, (4, 4), reductions=(1, 1.5))
    with pytest.raises(ConfigError, match=r"of which there is one.*add a branch"):
        Coupled(8, (4,))
    with pytest.raises(
        ConfigError, match=r"polynomial, sigmoid, or an object such as PolynomialKernel\(3\), got 'cubic'"
    ):
        Coupled(8, kernel="cubic")
    with pytest.raises(ConfigError, match="needs heritage or diversity"):
        Coupled(8, coupling=HeritageDiversity(heritage=False, diversity=False))
    with pytest.raises(ConfigError, match="at least one unit"):
        Deep(8, ())
    with pytest.raises(ConfigError, match="one of conv, separable, double-separable, got 'x'"):
        Deep(8, operator="x")
    with pytest.raises(ConfigError, match=r"at least one layer of positive channels, got \[\]"):
        FeedForward(8, ())
    with pytest.raises(ShapeError, match=r"divisible by 2, got \(9, 9\)"):
        Unit(3, (4, 4), reductions=(1, 2))(torch.randn(1, 3, 9, 9))
    with pytest.raises(ShapeError, match=r"divisible by 8 and H, W by 2"):
        Gaussian(3, 8)(torch.randn(1, 3, 5, 5))


@pytest.mark.parametrize("body", [Unit, Coupled, Gaussian, Kernel])
def test_an_empty_batch(body):
    assert branch_classifier(body).eval()(torch.randn(0, 3, 8, 8)).shape == (0, 10)


def test_any_module_is_a_body():
    network = ImageClassifier(ConvStem(3, 8), nn.Conv2d(8, 5, 3), Head(5, 4))
    assert network(torch.randn(2, 3, 6, 6)).shape == (2, 4)
    assert network.equilibrium_layers == []
