"""Classifiers of several branches: the published sizes, and that they train and tell what is wrong."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import yaml

from opteq import solve_log
from opteq.configs import presets, resolve_config
from opteq.errors import ConfigError, ShapeError
from opteq.gradients.phantom import Phantom
from opteq.gradients.unrolled import Unrolled
from opteq.models.branches import (
    MOptEqClassifier,
    ParallelGEQClassifier,
    ParallelKernelClassifier,
    POptEqClassifier,
)
from opteq.models.loading import build
from opteq.objectives.coupling import HeritageDiversity

SMALL = {"channels": 8, "hidden": (8, 16), "reductions": (1, 2), "stem": ()}
AVERAGED = {"fusion": "average", "pool": 1}
SIX = {"reductions": (1, 2, 4, 4, 8, 8), **AVERAGED}
GEQ5, GEQ8 = (64, 128, 128, 128, 256, 256), (80, 160, 160, 160, 320, 320)
LARGE = (48, 96, 192, 192, 384, 384)


def count(module):
    return sum(p.numel() for p in module.parameters())


def four(channels):
    hidden = tuple(channels // n for n in (8, 4, 2, 2))
    return {
        "channels": channels,
        "hidden": hidden,
        "reductions": (1, 2, 4, 8),
        "stem": (channels // 2,),
        **AVERAGED,
    }


def expected_count(channels, hidden, stem, head, projections=0):
    """Kernels `W` and `U`, stem with batch norm, head with bias, and the patch projections."""
    widths = (3, *stem, channels)
    units = 2 * 9 * channels * sum(hidden)
    convolutions = sum(9 * a * b + 2 * b for a, b in pairwise(widths))
    return units + convolutions + head[0] * head[1] + head[1] + projections


PUBLISHED = {
    # What the papers print, in thousands, and what the shapes give. Ten classes unless said.
    "single": (MOptEqClassifier, {}, 193, 193_306),
    "single-sum": (POptEqClassifier, {"fusion": "sum"}, 193, 193_306),
    "single-conv": (POptEqClassifier, {"fusion": "conv"}, 276, 276_250),
    "single-bias": (POptEqClassifier, {"bias": True}, 193.6, 193_626),
    "single-sigmoid": (MOptEqClassifier, {"kernel": "sigmoid"}, 193, 193_306),
    "four-128": (MOptEqClassifier, four(128), 480, 482_634),
    "four-256": (MOptEqClassifier, four(256), 1900, 1_923_722),
    "six-320": (MOptEqClassifier, {"channels": 320, "hidden": GEQ8, "stem": (320,), **SIX}, 8100, 7_846_730),
    "six-320-polynomial-100": (
        MOptEqClassifier,
        {
            "classes": 100,
            "channels": 320,
            "hidden": GEQ8,
            "stem": (320,),
            "kernel": "polynomial",
            **SIX,
        },
        8000,
        7_875_620,
    ),
    "six-320-deep-stem": (
        MOptEqClassifier,
        {"channels": 320, "hidden": GEQ8, "stem": (320,) * 3, **SIX},
        10_000,
        9_691_210,
    ),
    "imagenet": (
        MOptEqClassifier,
        {"classes": 1000, "channels": 384, "hidden": LARGE, "stem": (384,) * 3, **SIX},
        13_000,
        13_337_704,
    ),
    "geq-256": (ParallelGEQClassifier, {}, 5000, 5_036_298),
    "geq-256-100": (ParallelGEQClassifier, {"classes": 100}, 5000, 5_059_428),
    "geq-320": (ParallelGEQClassifier, {"channels": 320, "hidden": GEQ8, "stem": (320,)}, 8000, 7_859_018),
    "geq-320-100": (
        ParallelGEQClassifier,
        {"classes": 100, "channels": 320, "hidden": GEQ8, "stem": (320,)},
        8000,
        7_887_908,
    ),
    "geq-imagenet100": (
        ParallelGEQClassifier,
        {
            "classes": 100,
            "hidden": (32, 64, 128, 128, 256, 256),
            "stem": (256,) * 3,
            "downsamplings": 2,
            "patch_hidden": 128,
        },
        6000,
        5_810_020,
    ),
    "geq-imagenet100-large": (
        ParallelGEQClassifier,
        {
            "classes": 100,
            "channels": 384,
            "hidden": LARGE,
            "stem": (384,) * 3,
            "downsamplings": 2,
            "patch_hidden": 128,
        },
        13_000,
        13_015_780,
    ),
}


@pytest.mark.spec("R5.6", "R6.6")
@pytest.mark.parametrize(("model", "options", "printed", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_shapes_have_the_published_sizes(model, options, printed, parameters):
    with torch.device("meta"):
        network = model(**options)
    assert count(network) == parameters
    assert abs(parameters / 1000 - printed) / printed < 0.05


@pytest.mark.spec("R5.6", "R6.6")
def test_the_sizes_follow_from_the_shapes():
    single = expected_count(32, (64, 128, 128), (16,), (3 * 32 * 4, 10))
    assert single == 193_306
    assert count(POptEqClassifier(fusion="conv")) - single == 9 * 9 * 32 * 32 == 82_944
    assert count(POptEqClassifier(bias=True)) - single == 64 + 128 + 128
    assert expected_count(256, (32, 64, 128, 128), (128,), (256, 10)) == 1_923_722
    assert expected_count(256, GEQ5, (256,), (256, 100), 6 * 32 * 64) == 5_059_428
    assert expected_count(384, LARGE, (384,) * 3, (384, 100), 6 * 32 * 128) == 13_015_780


@pytest.mark.spec("R5.1")
def test_branches_have_the_sizes_of_their_reductions():
    network = POptEqClassifier(channels=6, hidden=(4, 4, 4, 4), reductions=(1, 2, 4, 8), stem=(), **AVERAGED)
    z = network.features(torch.randn(2, 3, 32, 32))
    assert [tuple(z_i.shape) for z_i in z] == [(2, 6, n, n) for n in (32, 16, 8, 4)]
    large = POptEqClassifier(channels=4, hidden=(4, 4), reductions=(1, 2), stem=(4,), downsamplings=2)
    z = large.features(torch.randn(1, 3, 256, 256))
    assert [tuple(z_i.shape) for z_i in z] == [(1, 4, 64, 64), (1, 4, 32, 32)]


MODELS = {
    "popteq": (POptEqClassifier, {}),
    "popteq-sum": (POptEqClassifier, {"fusion": "sum"}),
    "popteq-conv": (POptEqClassifier, {"fusion": "conv", "bias": True}),
    "mopteq": (MOptEqClassifier, {"perturbation": 0.02}),
    "mopteq-gauss-seidel": (MOptEqClassifier, {"perturbation": 0.0, "sweep": "gauss-seidel"}),
    "mopteq-unrolled": (MOptEqClassifier, {"perturbation": 0.0, "gradient": Unrolled(6)}),
    "mopteq-polynomial": (MOptEqClassifier, {"kernel": "polynomial", "perturbation": 0.02}),
    "mopteq-sigmoid": (MOptEqClassifier, {"kernel": "sigmoid", "perturbation": 0.0, **AVERAGED}),
    "geq": (ParallelGEQClassifier, {"patch_hidden": 6, "gradient": Phantom(), **AVERAGED}),
    "kerdeq": (ParallelGEQClassifier, {"patch_hidden": 6, "gamma": 0.05, "fusion": "concat", "pool": 2}),
    "polynomial": (ParallelKernelClassifier, {"kernel": "polynomial"}),
    "sigmoid": (ParallelKernelClassifier, {"kernel": "sigmoid"}),
}


@pytest.mark.spec("R5.1", "R5.6", "R6.6")
@pytest.mark.parametrize(("model", "options"), MODELS.values(), ids=MODELS)
def test_training_lowers_the_loss_and_reaches_every_parameter(model, options):
    torch.manual_seed(0)
    network = model(classes=3, **SMALL, **options)
    x, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    x += labels[:, None, None, None]
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    with solve_log(network) as log:
        for _ in range(15):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), labels)
            loss.backward()
            losses.append(loss.item())
            assert all(p.grad is not None and p.grad.norm() > 0 for p in network.parameters())
            optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert log.forward.unconverged == 0
    network.eval()
    with torch.no_grad():
        together = network(x)
        alone = torch.cat([network(image[None]) for image in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=3e-2)


@pytest.mark.spec("R5.4")
def test_perturbations_are_on_in_training_only():
    torch.manual_seed(0)
    calm, perturbed = (MOptEqClassifier(**SMALL, perturbation=size) for size in (0.0, 0.5))
    perturbed.load_state_dict(calm.state_dict())
    x = torch.randn(4, 3, 8, 8)
    calm.train()
    perturbed.train()
    assert not torch.allclose(calm(x), perturbed(x), atol=1e-3)
    calm.eval()
    perturbed.eval()
    torch.testing.assert_close(calm(x), perturbed(x))


@pytest.mark.spec("R5.5")
def test_the_default_ceiling_makes_the_equilibrium_unique():
    assert 0.85**2 * (1 + 0.01 * 31) < 1 < 0.9**2 * (1 + 0.01 * 31)
    assert MOptEqClassifier().equilibria.map.uniqueness_checked
    assert not MOptEqClassifier(max_norm=0.9).equilibria.map.uniqueness_checked
    assert 0.92**2 * (1 + 0.01 * 31 + 1) / 2 < 1 < 0.94**2 * (1 + 0.01 * 31 + 1) / 2
    for kernel in ("polynomial", "sigmoid"):
        assert MOptEqClassifier(kernel=kernel, max_norm=0.92).equilibria.map.uniqueness_checked
        assert not MOptEqClassifier(kernel=kernel, max_norm=0.94).equilibria.map.uniqueness_checked


BRANCHED = [p.name for p in presets() if "opteq.models.branches" in resolve_config(p.name).read_text()]


@pytest.mark.spec("R5.5", "R5.6", "R6.6")
@pytest.mark.parametrize("name", BRANCHED)
def test_presets_fit_their_images_and_have_one_equilibrium(name):
    config = yaml.safe_load(resolve_config(name).read_text())
    options = config["model"]["network"]["init_args"]
    network = build(config["model"]["network"])
    size = config["data"]["init_args"].get("image_size", 32) >> options.get("downsamplings", 0)
    patch = options.get("patch_size", 1)
    assert all(size % (reduction * patch) == 0 for reduction in options["reductions"])
    if isinstance(network, MOptEqClassifier):
        assert network.equilibria.map.uniqueness_checked


def test_logits_are_those_of_the_equilibria():
    torch.manual_seed(0)
    network = MOptEqClassifier(**SMALL).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(network.classify(network.features(x)), network(x))


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="per branch, got 3 and 2"):
        POptEqClassifier(hidden=(4, 4, 4), reductions=(1, 2))
    with pytest.raises(ConfigError, match="per branch, got 0 and 0"):
        POptEqClassifier(hidden=(), reductions=())
    with pytest.raises(ConfigError, match=r"of which there is one.*add a branch"):
        MOptEqClassifier(hidden=(4,), reductions=(1,))
    with pytest.raises(
        ConfigError, match=r"polynomial, sigmoid, or an object such as PolynomialKernel\(3\), got 'cubic'"
    ):
        MOptEqClassifier(kernel="cubic")
    with pytest.raises(ConfigError, match="`hidden` to be a list with one number per branch, got 4"):
        POptEqClassifier(hidden=4)
    with pytest.raises(ConfigError, match=r"`factor` to be a whole number of at least 1, got 1\.5"):
        POptEqClassifier(hidden=(4, 4), reductions=(1, 1.5))
    with pytest.raises(ConfigError, match=r"`dropout` to be a probability from 0 to 1, got 2\.0"):
        POptEqClassifier(dropout=2.0)
    with pytest.raises(ConfigError, match="`fusion` to be concat, sum, conv or average"):
        POptEqClassifier(fusion="max")
    with pytest.raises(ConfigError, match="positive channels, classes and pool"):
        POptEqClassifier(pool=0)
    with pytest.raises(ConfigError, match="needs heritage or diversity"):
        MOptEqClassifier(coupling=HeritageDiversity(heritage=False, diversity=False))
    with pytest.raises(ShapeError, match=r"divisible by 2, got \(9, 9\)"):
        POptEqClassifier(**SMALL)(torch.randn(1, 3, 9, 9))
    with pytest.raises(ShapeError, match=r"divisible by 8 and H, W by 2"):
        ParallelGEQClassifier(**SMALL)(torch.randn(1, 3, 6, 6))
    with pytest.raises(ShapeError, match=r"images of shape \(batch, 3, height, width\)"):
        POptEqClassifier(**SMALL)(torch.randn(1, 1, 8, 8))
    for dtype in (torch.uint8, torch.float64):
        message = rf"images of torch.float32, got {dtype}; convert them with images.to\(torch.float32\)"
        with pytest.raises(ShapeError, match=message):
            POptEqClassifier(**SMALL)(torch.zeros(1, 3, 8, 8, dtype=dtype))


@pytest.mark.parametrize("model", [POptEqClassifier, MOptEqClassifier, ParallelGEQClassifier])
def test_an_empty_batch(model):
    assert model(**SMALL).eval()(torch.randn(0, 3, 8, 8)).shape == (0, 10)
