"""Deep OptEq classifiers: the published shapes, and that they train in every mode."""

import pytest
import torch
import torch.nn.functional as F

from opteq import (
    HSIC,
    SAM,
    Decorrelation,
    Implicit,
    RandomFeatureHSIC,
    SquaredNorm,
    Unrolled,
    solve_log,
)
from opteq.errors import ConfigError, ShapeError
from opteq.models.baselines.feedforward import FeedForwardClassifier
from opteq.models.deep import DeepOptEqClassifier, ResNetDeepOptEqClassifier
from opteq.models.extractors import resnet_stages

SMALL = {"channels": 6, "hidden": (4, 8, 8), "downsampling": 2}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.spec("R2.1")
@pytest.mark.parametrize(
    ("hidden", "expected", "printed"),
    [((16, 32, 64, 128, 128), 200_238, 199_000), ((16, 32, 64, 64, 128), 165_614, 162_000)],
)
def test_the_cifar_presets_have_the_published_sizes(hidden, expected, printed):
    network = DeepOptEqClassifier(hidden=hidden)
    assert count(network) == expected
    assert abs(expected - printed) / printed < 0.03
    # From the shapes: W and U with bias per unit, one convolution as the stem, ten classes.
    kernels = sum(2 * 30 * n * 9 + n for n in hidden)
    assert expected == kernels + (3 * 30 * 9 + 30) + (30 * 10 + 10)


@pytest.mark.spec("R2.1")
def test_learned_alphas_add_one_parameter_per_unit():
    assert count(DeepOptEqClassifier(learn_alpha=True)) == 200_238 + 5


@pytest.mark.spec("R2.7")
@pytest.mark.parametrize(
    ("extractor", "size", "parts"),
    [
        # Extractor, units and head. The paper prints 8 + 7 + 3 M and 24 + 13 + 3 M.
        ("resnet50", "small", (1_444_928, 2_670_080, 4_673_512)),
        ("wide_resnet50", "mid", (4_126_528, 4_901_376, 4_673_512)),
    ],
)
def test_the_sizes_of_table_6(extractor, size, parts):
    with torch.device("meta"):
        network = ResNetDeepOptEqClassifier(extractor=extractor, size=size)
    assert tuple(map(count, (network.stem, network.equilibria, network.head))) == parts
    separable = {
        "small": 512 * 9 + 512 * 512,
        "mid": 1024 * 25 + 1024 * 512 + 512 * 9 + 512 * 512,
    }[size]
    units = {"small": 5, "mid": 3}[size]
    assert parts[1] == units * (2 * separable + 512)
    head = 512 * 1024 + 1024 + 1024 * 2048 + 2048
    assert parts[2] == head + 2048 * 1000 + 1000


@pytest.mark.spec("R2.7")
def test_the_extractor_is_two_stages_at_an_eighth_of_the_size():
    stages = resnet_stages("resnet50").eval()
    with torch.no_grad():
        assert stages(torch.randn(1, 3, 224, 224)).shape == (1, 512, 28, 28)
        assert resnet_stages("wide_resnet50", 1)(torch.randn(2, 1, 32, 32)).shape == (2, 512, 4, 4)


@pytest.mark.spec("R2.7")
def test_a_table_6_network_takes_a_training_step():
    torch.manual_seed(0)
    network = ResNetDeepOptEqClassifier(classes=4, gradient=Unrolled(2))
    logits = network(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 4)
    F.cross_entropy(logits, torch.tensor([0, 3])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


MODES = {
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


@pytest.mark.spec("R3.1", "R3.2", "R3.5")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_every_training_mode_lowers_the_loss(options):
    torch.manual_seed(0)
    network = DeepOptEqClassifier(classes=3, **SMALL, **options)
    x, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    x += labels[:, None, None, None]
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    with solve_log(network) as log:
        for _ in range(25):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert log.forward.unconverged == log.adjoint.unconverged == 0
    network.eval()
    with torch.no_grad():
        together = network(x)
        alone = torch.cat([network(image[None]) for image in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=2e-2)


@pytest.mark.spec("R3.5")
def test_the_mode_is_one_key():
    kinds = [
        type(DeepOptEqClassifier(**SMALL, gradient=g).equilibrium_layers[0].gradient)
        for g in (None, Unrolled(2))
    ]
    assert kinds == [Implicit, Unrolled]


@pytest.mark.spec("R7.8")
def test_the_feed_forward_baseline_is_equation_1_with_as_many_parameters():
    network = FeedForwardClassifier()
    assert abs(count(network) - count(DeepOptEqClassifier())) / count(network) < 1e-3
    small = FeedForwardClassifier(classes=3, channels=4, hidden=(5, 6, 7), downsampling=2)
    x = torch.randn(2, 3, 8, 8)
    given = F.avg_pool2d(F.conv2d(x, small.stem[0].weight, small.stem[0].bias, padding=1), 2)
    z = torch.zeros(2, 1, 4, 4)
    recurrent = [torch.zeros(5, 1, 3, 3), *(layer.weight for layer in small.layers)]
    for W, U in zip(recurrent, small.inputs, strict=True):
        z = F.relu(F.conv2d(z, W, padding=1) + F.conv2d(given, U.weight, U.bias, padding=1))
    expected = z.mean((2, 3)) @ small.head.weight.mT + small.head.bias
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-6)


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="positive channels, classes and downsampling"):
        DeepOptEqClassifier(downsampling=0)
    with pytest.raises(ConfigError, match="at least one unit"):
        DeepOptEqClassifier(hidden=())
    with pytest.raises(ConfigError, match="`extractor` to be one of resnet50, wide_resnet50, got 'vgg'"):
        ResNetDeepOptEqClassifier(extractor="vgg")
    with pytest.raises(ConfigError, match="`size` to be one of small, mid, got 'large'"):
        ResNetDeepOptEqClassifier(size="large")
    with pytest.raises(ConfigError, match="at least one layer"):
        FeedForwardClassifier(hidden=())
    for network in (DeepOptEqClassifier(**SMALL), FeedForwardClassifier()):
        with pytest.raises(
            ShapeError, match=r"images of shape \(batch, 3, height, width\), got \(2, 1, 8, 8\)"
        ):
            network(torch.randn(2, 1, 8, 8))
