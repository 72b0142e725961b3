"""PGD against the known optimum on a linear network and an attack written out step by step."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opteq
from opteq import Anderson, Conv2d, EquilibriumLayer, Implicit, OptEqUnit, Unrolled
from opteq.data.digits import Digits
from opteq.errors import ConfigError, NonFiniteError
from opteq.evaluation.attacks import PGD, attacked_accuracy
from opteq.evaluation.saliency import grad_cam

MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
NORMALIZATION = (MEAN, DEVIATION)


def normalised(pixels):
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


def pixels_of(images):
    return images * torch.tensor(DEVIATION)[:, None, None] + torch.tensor(MEAN)[:, None, None]


@pytest.fixture
def pixels():
    return torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels():
    return torch.arange(6) % 2


@pytest.mark.spec("R7.4")
def test_on_a_linear_network_it_finds_the_worst_corner_of_the_ball(pixels, labels):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    epsilon = 8 / 255
    attack = PGD(steps=10, epsilon=epsilon, step_size=4 / 255)
    attacked = pixels_of(attack(network, normalised(pixels), labels, NORMALIZATION))
    # With two classes the loss falls monotonously in the margin, which is linear in the pixels.
    rows = network[1].weight
    slope = (rows[1 - labels] - rows[labels]).reshape(pixels.shape) / torch.tensor(DEVIATION)[:, None, None]
    worst = (pixels + epsilon * slope.sign()).clamp(0, 1)
    torch.testing.assert_close(attacked, worst, rtol=0, atol=1e-6)


@pytest.mark.spec("R7.4")
def test_more_steps_do_more_harm_and_the_unrolled_network_is_no_weaker():
    network, data = opteq.load("digits"), Digits(batch_size=100)
    data.prepare_data()
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    (layer,) = network.equilibrium_layers

    def survivors(steps: int) -> int:
        attack = PGD(steps, epsilon=0.1, step_size=None, random_start=False)
        return int((network(attack(network, images, labels, data.normalization)).argmax(1) == labels).sum())

    layer.solver, layer.gradient = Anderson(tol=1e-4), Implicit(tol=1e-4)
    counts = [survivors(steps) for steps in (1, 5, 15)]
    assert 80 > counts[0] >= counts[1] >= counts[2] > 20
    layer.solver, layer.gradient = None, Unrolled(25)
    assert survivors(5) >= counts[1] - 1


@pytest.mark.spec("R7.4")
def test_every_step_is_that_of_the_definition(pixels, labels):
    torch.manual_seed(2)
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)).eval()
    attack = PGD(steps=3, epsilon=0.05, step_size=0.03, random_start=False)
    found = pixels_of(attack(network, normalised(pixels), labels, NORMALIZATION))
    moved = pixels.clone()
    for _ in range(3):
        for sample in range(len(pixels)):
            point = moved[sample : sample + 1].clone().requires_grad_()
            loss = F.cross_entropy(network(normalised(point)), labels[sample : sample + 1])
            (gradient,) = torch.autograd.grad(loss, point)
            step = moved[sample] + 0.03 * gradient[0].sign()
            low, high = pixels[sample] - 0.05, pixels[sample] + 0.05
            moved[sample] = torch.minimum(torch.maximum(step, low), high).clamp(0, 1)
    torch.testing.assert_close(found, moved, rtol=0, atol=1e-5)


def test_it_stays_in_the_ball_and_the_range_of_pixels_and_leaves_the_network_alone(pixels, labels):
    torch.manual_seed(3)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(3, 4, 3), Conv2d(3, 4, 3)))
    network = nn.Sequential(layer, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = normalised(pixels)
    attacked = PGD(steps=4, epsilon=0.1, step_size=0.07)(network, images, labels, NORMALIZATION)
    moved = pixels_of(attacked)
    assert (moved - pixels).abs().max() <= 0.1 + 1e-6
    assert moved.min() >= -1e-6
    assert moved.max() <= 1 + 1e-6
    assert not attacked.requires_grad
    assert not images.requires_grad
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    network.eval()
    loss = [F.cross_entropy(network(x), labels).item() for x in (images, attacked)]
    assert loss[1] > loss[0]


@pytest.mark.spec("R7.4")
def test_attacked_accuracy_counts_what_survives(pixels):
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2, bias=False))
    with torch.no_grad():
        # The second logit is the mean pixel above a half, the first one its negative.
        weight = (torch.tensor(DEVIATION)[:, None, None].expand(3, 4, 4) / 48).reshape(-1)
        network[1].weight.copy_(torch.stack([-weight, weight]))
    margin = torch.tensor([-0.2, -0.03, 0.03, 0.2])
    images = normalised(torch.tensor(MEAN)[:, None, None] + margin[:, None, None, None].expand(4, 3, 4, 4))
    labels = (margin > 0).long()
    batches = [(images[:3], labels[:3]), (images[3:], labels[3:])]
    assert attacked_accuracy(network, batches, PGD(epsilon=0.0), NORMALIZATION) == 1.0
    attack = PGD(steps=8, epsilon=0.05, step_size=0.05)
    assert attacked_accuracy(network, batches, attack, NORMALIZATION) == 0.5


@pytest.mark.spec("R7.4")
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_the_scale_of_the_logits_does_not_count(pixels, scale, classes):
    """Of logits in the thousands the cross entropy of float32 has no gradient."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, classes))
    images = normalised(pixels)
    labels = network(images).argmax(1)
    attack = PGD(steps=3, epsilon=0.2, step_size=0.1, random_start=False)
    exact = network.double()
    expected = attack(exact, images.double(), labels, NORMALIZATION)
    for p in network.float().parameters():
        p.data.mul_(scale)
    assert attacked_accuracy(network, [(images, labels)], attack, NORMALIZATION) == 0.0
    if classes == 2 or scale == 1:
        torch.testing.assert_close(
            attack(network, images, labels, NORMALIZATION), expected.float(), rtol=0, atol=1e-5
        )


class OnePixel(nn.Module):
    """Logits that are functions of the first pixel."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return torch.stack(self.logits(x[:, 0, 0, 0]), 1)


def accuracy_of(logits, attack):
    """Under an attack on an image of one half, of class 0."""
    batch = torch.full((1, 1, 1, 1), 0.5), torch.tensor([0])
    return attacked_accuracy(OnePixel(logits), [batch], attack, (0.0, 1.0))


@pytest.mark.spec("R7.4")
def test_falling_steps_find_what_steps_of_one_size_step_over():
    def thin(x):  # class 0 loses on an interval of width 0.002 alone
        return (x - 0.503).abs(), torch.full_like(x, 0.001)

    options = {"steps": 100, "epsilon": 0.02, "random_start": False}
    assert accuracy_of(thin, PGD(**options, step_size=0.005)) == 1.0
    assert accuracy_of(thin, PGD(**options, step_size=None)) == 0.0


def auto_pgd(value, slope, x, epsilon, steps):
    """Croce & Hein 2020, Algorithm 1, for one number: what points are tried, and the sizes of the steps."""
    low, high = x - epsilon, x + epsilon
    p = [0.0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    checkpoints = [math.ceil(round(share * steps, 6)) for share in p]
    points, sizes = [x, min(max(x + 2 * epsilon * np.sign(slope(x)), low), high)], [2 * epsilon]
    best, where, size, j = value(x), x, 2 * epsilon, 1
    then = (size, best)
    if value(points[1]) > best:
        best, where = value(points[1]), points[1]
    tried, sequence = list(points), [value(x), value(points[1])]
    for k in range(1, steps):
        before, x = points[-2:]
        if k == checkpoints[j]:
            rises = sum(sequence[i + 1] > sequence[i] for i in range(checkpoints[j - 1], checkpoints[j]))
            few = rises < 0.75 * (checkpoints[j] - checkpoints[j - 1])
            if few or (then[0] == size and then[1] == best):
                then = (size, best)
                size, points[-1], sequence[-1] = size / 2, where, best
            else:
                then = (size, best)
            x, j = points[-1], j + 1
        z = min(max(x + size * np.sign(slope(x)), low), high)
        points.append(min(max(x + 0.75 * (z - x) + 0.25 * (x - before), low), high))
        tried.append(points[-1])
        sizes.append(size)
        sequence.append(value(points[-1]))
        if sequence[-1] > best:
            best, where = sequence[-1], points[-1]
    return tried, sizes


@pytest.mark.spec("R7.4")
@pytest.mark.parametrize("steps", [1, 2, 7, 50, 100])
def test_falling_steps_are_those_of_auto_pgd(steps):
    """On the logits 0 and `v(x)`, whose margin has maxima of several heights; all in float64."""

    def value(x):
        return 0.3 * math.sin(40 * x) - 5 * (x - 0.52) ** 2 - 1

    def slope(x):
        return 12 * math.cos(40 * x) - 10 * (x - 0.52)

    seen = []

    def wavy(x):
        seen.append(x.item())
        return torch.zeros_like(x), 0.3 * (40 * x).sin() - 5 * (x - 0.52) ** 2 - 1

    attack = PGD(steps=steps, epsilon=0.1, step_size=None, random_start=False)
    x = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    found = attack(OnePixel(wavy), x, torch.tensor([0]), (0.0, 1.0)).item()
    tried, sizes = auto_pgd(value, slope, 0.5, 0.1, steps)
    assert seen == pytest.approx(tried, abs=1e-9)
    assert found == pytest.approx(max(tried, key=value), abs=1e-9)
    assert len(set(sizes)) >= {1: 1, 2: 1, 7: 2, 50: 4, 100: 6}[steps]


@pytest.mark.spec("R7.4")
def test_falling_steps_keep_the_wrong_class_that_they_have_seen():
    """Nine classes together have better odds at the top than the one that wins at the start."""

    def several(x):
        one, nine = 0.1 - 8 * (x - 0.5).abs(), -1.9 + 5 * (x - 0.4)
        return torch.zeros_like(x), one, *[nine] * 9

    options = {"steps": 100, "epsilon": 0.1, "random_start": False}
    assert accuracy_of(several, PGD(**options, step_size=0.005)) == 1.0
    assert accuracy_of(several, PGD(**options, step_size=None)) == 0.0


@pytest.mark.spec("R7.4")
def test_restarts_move_towards_one_wrong_class_after_the_other():
    def trap(x):  # towards class 1, which is the likeliest but cannot win; class 2 wins below 0.334
        return torch.zeros_like(x), (3 * (x - 0.5)).clamp(max=0.05) - 0.1, -3 * (x - 0.5) - 0.5

    options = {"steps": 20, "epsilon": 0.2, "step_size": 0.02, "random_start": False}
    assert accuracy_of(trap, PGD(**options)) == 1.0
    assert accuracy_of(trap, PGD(**options, restarts=2)) == 1.0
    assert accuracy_of(trap, PGD(**options, restarts=3)) == 0.0


@pytest.mark.spec("R7.4")
@pytest.mark.parametrize("step_size", [0.05, None])
def test_the_wrong_class_that_came_closest_is_that_of_the_attacked_image(step_size):
    """Class 4 is the furthest from winning on the image, and the closest where the first turn ends, at 0.6.

    The decoys 1 to 3 lead that turn upwards, where nothing wins; class 4 wins below 0.417 and has its least
    in between.
    """

    def valley(x):
        rise = x - 0.5
        decoys = [(20 * rise).clamp(max=0.04) - lag for lag in (0.1, 0.15, 0.2)]
        return torch.zeros_like(x), *decoys, torch.maximum(-6 * rise, 7 * rise - 0.25) - 0.5

    clean = torch.stack(valley(torch.tensor([0.5, 0.6])), 1)[:, 1:]
    assert clean.argmin(1).tolist() == [3, 2]
    options = {"steps": 40, "epsilon": 0.1, "step_size": step_size, "random_start": False}
    assert accuracy_of(valley, PGD(**options)) == 1.0
    # The second turn goes to the one that came closest.
    assert accuracy_of(valley, PGD(**options, restarts=2)) == 0.0


def test_images_without_a_gradient_are_counted(pixels):
    class Rounded(nn.Module):
        def forward(self, x):
            return torch.stack((x.mean((1, 2, 3)).round(), torch.full_like(x[:, 0, 0, 0], 0.5)), 1)

    images, labels = torch.ones(5, 3, 4, 4), torch.tensor([0, 0, 0, 1, 1])
    with pytest.warns(UserWarning, match=r"gradient of 3 of 5 images was zero.*overstates"):
        accuracy = attacked_accuracy(Rounded(), [(images, labels)], PGD(epsilon=0.01), (0.0, 0.5))
    assert accuracy == 0.6


def test_logits_that_are_not_finite_are_refused(pixels, labels):
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    network[1].weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="6 of 6 images"):
        PGD()(network, normalised(pixels), labels, NORMALIZATION)


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_network_without_two_classes_is_refused(pixels, restarts):
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 1))
    with pytest.raises(ConfigError, match=r"logits of two classes or more to attack, got shape \(6, 1\)"):
        PGD(restarts=restarts)(network, normalised(pixels), torch.zeros(6, dtype=torch.long), NORMALIZATION)


def test_a_frozen_batch_norm_stays_frozen(pixels, labels):
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).train()
    network[0].eval()
    PGD()(network, normalised(pixels), labels, NORMALIZATION)
    attacked_accuracy(network, [(normalised(pixels), labels)], PGD(), NORMALIZATION)
    grad_cam(network, normalised(pixels), module=network[1])
    assert [module.training for module in network] == [False, True, True, True]
    assert network.training


def test_bad_options_are_refused():
    for options, message in (
        ({"steps": 0}, "`steps` of PGD to be at least 1, got 0"),
        ({"epsilon": -0.1}, "`epsilon` of PGD to be at least 0"),
        ({"step_size": 0}, "`step_size` of PGD to be positive, or None, got 0"),
        ({"restarts": 0}, "`restarts` of PGD to be at least 1, got 0"),
        ({"strength": 1}, "no option 'strength'"),
    ):
        with pytest.raises(ConfigError, match=message):
            PGD(**options)
