import pytest
import torch
from torch import nn

import opteq
from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, GaussianMap, OptEqUnit, Unrolled
from opteq.data.digits import Digits
from opteq.errors import ConfigError, ConvergenceError, NonFiniteError, ShapeError
from opteq.models.bodies import Coupled, Gaussian, Kernel, Unit
from opteq.operators.base import LinearOperator
from opteq.theory import robustness
from opteq.theory.lipschitz import lipschitz_bound
from opteq.theory.robustness import robust_radius
from tests.networks import branch_classifier
from tests.theory.attacked_digits import BEYOND, changed_predictions, images_of_digits
from tests.theory.test_lipschitz import steepest_ratio


def dense_classifier():
    layer = EquilibriumLayer(OptEqUnit(Dense(6, 8), Dense(5, 8), max_norm=0.7))
    return nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), layer, nn.Linear(6, 3)), (4,)


def convolutional_classifier():
    layer = EquilibriumLayer(GaussianMap(Conv2d(3, 4), Conv2d(2, 4), gamma=0.05, max_norm=0.9))
    stem = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.BatchNorm2d(2), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(3, 4))
    return nn.Sequential(stem, layer, head), (1, 6, 6)


def without_linear_head():
    return nn.Sequential(EquilibriumLayer(OptEqUnit(Dense(3, 8), Dense(4, 8), max_norm=0.7)), nn.Tanh()), (4,)


def attack(classifier, x, radius, steps=25):
    """The classes that projected gradient ascent on every other class's margin reaches within a radius."""
    predicted = classifier(x).argmax(1)
    classes = classifier(x).shape[1]
    flipped = torch.zeros(len(x), dtype=torch.bool)
    unit = radius.reshape(-1, *[1] * (x.dim() - 1))
    for target in range(classes):
        delta = torch.zeros_like(x)
        for _ in range(steps):
            delta.requires_grad_()
            logits = classifier(x + delta)
            margin = logits[:, target] - logits.gather(1, predicted[:, None])[:, 0]
            (gradient,) = torch.autograd.grad(margin.sum(), delta)
            size = gradient.flatten(1).norm(dim=1).reshape(unit.shape).clamp(min=1e-30)
            delta = delta.detach() + 0.2 * unit * gradient / size
            length = delta.flatten(1).norm(dim=1).reshape(unit.shape)
            delta = delta * (unit / length.clamp(min=1e-30)).clamp(max=1)
        flipped |= classifier(x + delta).argmax(1) != predicted
    return flipped


def branches(kind, **options):
    shapes = {"in_channels": 1, "classes": 3, "channels": 3, "widths": (2,), "bias": True}
    return branch_classifier(kind, hidden=(4, 4), **shapes, **options), (1, 4, 4)


BRANCHES = {
    "parallel": lambda: branches(Unit, max_norm=0.7, fusion="sum"),
    "parallel conv": lambda: branches(Unit, max_norm=0.7, fusion="conv", pool=1),
    "coupled": lambda: branches(Coupled, max_norm=0.7),
    "kernels": lambda: branches(Kernel, max_norm=0.7, fusion="average"),
    "gaussian": lambda: branches(
        Gaussian, max_norm=0.7, gamma=0.02, patch_channels=4, fusion="average", pool=1
    ),
}


def steepened(classifier, shape):
    """In float64 and eval mode, solved tightly, with weights that the ceilings reduce and no favourite class.

    Weights above 0 before the head make the stages stretch the same images: the bound has less slack.
    """
    for module in classifier.double().eval().modules():
        if isinstance(module, EquilibriumLayer):
            module.solver, module.on_unconverged = Anderson(1e-9, 1000, damping=0.5), "raise"
        elif isinstance(module, LinearOperator | nn.Conv2d) and hasattr(module, "weight"):
            module.weight.data.abs_()
    for branch in classifier.body.map.children():
        for unit in branch:
            unit.W.weight.data *= 10
    with torch.no_grad():
        x = 1 + torch.randn(30, *shape, dtype=torch.float64)
        classifier.head[-1].bias -= classifier(x).mean(0)
    return classifier, shape


def joined(state):
    return torch.cat([z.flatten(1) for z in ((state,) if isinstance(state, torch.Tensor) else state)], 1)


@pytest.mark.spec("R5.1", "R5.5")
@pytest.mark.parametrize("make", BRANCHES.values(), ids=BRANCHES)
def test_no_pair_of_images_beats_the_bound_of_a_branch_classifier(make):
    torch.manual_seed(0)
    classifier, shape = steepened(*make())
    # Up to the equilibria as well, where less is lost that could hide an error.
    for network, share in ((classifier, 0.02), (nn.Sequential(*classifier.stages[:2]), 0.05)):
        bound = lipschitz_bound(network, torch.zeros(1, *shape, dtype=torch.float64))
        assert bound.kind == "bound"
        a, b = 1 + 2 * torch.randn(2, 20, *shape, dtype=torch.float64)
        moved = (joined(network(a)) - joined(network(b))).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
        ascent = steepest_ratio(lambda x, f=network: joined(f(1 + x)), shape, 1.0, starts=6, steps=20)
        assert share * bound.value < max(moved.max().item(), ascent) <= bound.value


@pytest.mark.spec("R5.1", "R5.5")
@pytest.mark.parametrize("make", BRANCHES.values(), ids=BRANCHES)
def test_no_attack_on_a_branch_classifier_inside_the_radius_succeeds(make):
    torch.manual_seed(0)
    classifier, shape = steepened(*make())
    x = 1 + torch.randn(4, *shape, dtype=torch.float64)
    radius = robust_radius(classifier, x)
    assert (radius > 0).all()
    assert not attack(classifier, x, 0.999 * radius, steps=12).any()
    assert attack(classifier, x, 100 * radius).any()


def test_what_cannot_be_bounded_in_a_branch_classifier_is_named():
    x = torch.zeros(1, 1, 4, 4)
    classifier, _ = branches(Coupled, kernel="sigmoid", max_norm=0.7)
    with pytest.raises(ConfigError, match="coupled kernel maps"):
        lipschitz_bound(classifier.eval(), x)
    classifier, _ = branches(Kernel, max_norm=None)
    with pytest.raises(ConfigError, match=r"SigmoidKernel.*grows with the input"):
        lipschitz_bound(classifier.eval(), x)
    classifier, _ = branches(Coupled, max_norm=0.7)
    classifier.eval().body.train()
    with pytest.raises(ConfigError, match=r"jump.*call eval\(\)"):
        lipschitz_bound(classifier, x)


@pytest.mark.spec("R6.4", "R1.1")
@pytest.mark.parametrize("make", [dense_classifier, convolutional_classifier, without_linear_head])
def test_no_attack_inside_the_radius_succeeds_and_larger_ones_do(make):
    torch.manual_seed(0)
    classifier, shape = make()
    classifier = classifier.double().eval()
    for module in classifier.modules():
        if isinstance(module, EquilibriumLayer):
            module.map.W.weight.data *= 10
            module.solver = Anderson(tol=1e-9, max_steps=300)
    x = torch.randn(6, *shape, dtype=torch.float64)
    radius = robust_radius(classifier, x)
    assert (radius > 0).all()
    assert not attack(classifier, x, 0.999 * radius).any()
    assert attack(classifier, x, 100 * radius).any()


def trained_on_digits():
    """A classifier of handwritten digits whose bound is not far from the truth, and images."""
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(24, 48), Dense(64, 48), max_norm=0.5)
    classifier = nn.Sequential(nn.Flatten(), EquilibriumLayer(unit, Anderson(1e-4)), nn.Linear(24, 10))
    data = Digits()
    data.setup("fit")
    images, labels = (torch.cat(parts) for parts in zip(*data.train_dataloader(), strict=True))
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3, weight_decay=0.3)
    for batch in torch.randint(len(images), (150, 64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(classifier(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        assert (classifier.eval()(images).argmax(1) == labels).float().mean() > 0.9
    return classifier, images[:28]


@pytest.mark.spec("R1.1")
def test_ten_thousand_steps_within_the_radius_change_no_prediction_of_a_trained_classifier():
    classifier, images = trained_on_digits()
    assert not changed_predictions(classifier, images, 0.999, steps=40).any()  # 252 in each of 40 steps
    assert changed_predictions(classifier, images, 10.0, steps=5).any()


@pytest.mark.spec("R1.1")
def test_attacks_within_the_radius_change_no_prediction_of_the_packaged_digits():
    network, images = opteq.load("digits"), images_of_digits(4)
    for dtype in (torch.float32, torch.float64):
        network, images = network.to(dtype), images.to(dtype)
        assert not changed_predictions(network, images, 0.999).any()
        assert changed_predictions(network, images, BEYOND, steps=5).any()


@pytest.mark.spec("R1.1")
def test_the_radius_of_a_linear_classifier_is_its_distance_to_the_boundary():
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    weight, logits = classifier[1].weight, classifier(x)
    for sample, radius in zip(range(5), robust_radius(classifier, x), strict=True):
        top = logits[sample].argmax()
        distances = [
            (logits[sample, top] - logits[sample, k]) / (weight[top] - weight[k]).norm()
            for k in range(3)
            if k != top
        ]
        torch.testing.assert_close(radius, min(distances).detach())


@pytest.mark.spec("R1.1")
@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e150])
def test_the_size_of_the_last_weights_does_not_count(size: float):
    """The radius was infinite where the squares of the weights vanish."""
    classifier = nn.Linear(2, 2, bias=False).double()
    classifier.weight.data = size * torch.eye(2, dtype=torch.float64)
    radius = robust_radius(classifier, torch.tensor([[3.0, 1.0]], dtype=torch.float64))
    assert radius.item() == pytest.approx(2**0.5)


@pytest.mark.parametrize("last", [nn.Flatten(), nn.Linear(2, 2).double()], ids=["none", "linear"])
def test_logits_that_overflow_are_no_ground_for_a_radius(last: nn.Module):
    first = nn.Linear(1, 2, bias=False).double()
    first.weight.data = torch.tensor([[1e200], [-1.0]], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="logits are NaN or infinite in float64"):
        robust_radius(nn.Sequential(first, last), torch.tensor([[1e200]], dtype=torch.float64))


@pytest.mark.spec("R1.1")
def test_without_a_linear_last_stage_the_radius_is_attained_by_logits_that_move_as_the_input_does():
    x = torch.tensor([[3.0, 1.0, -2.0], [0.5, 0.5, 4.0]], dtype=torch.float64)
    # The planes where two coordinates are equal.
    expected = torch.tensor([2.0, 3.5], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(robust_radius(nn.Sequential(nn.Flatten(), nn.Identity()), x), expected)


@pytest.mark.spec("R1.1")
def test_the_radius_is_attained_on_the_line():
    # z = w(w z + u x), so that z = w u x / (1 - w²) and the logits differ by 2 z - 1.
    unit = OptEqUnit(Dense(1, 1), Dense(1, 1), "identity").double()
    unit.W.weight.data.fill_(0.8)
    unit.injection.operator.weight.data.fill_(3.0)
    head = nn.Linear(1, 2).double()
    head.weight.data = torch.tensor([[1.5], [-0.5]], dtype=torch.float64)
    head.bias.data = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    x = torch.tensor([[1.0], [-0.3]], dtype=torch.float64)
    boundary = 0.5 * (1 - 0.8**2) / (0.8 * 3.0)
    radius = robust_radius(nn.Sequential(EquilibriumLayer(unit), head), x)
    torch.testing.assert_close(radius, (x[:, 0] - boundary).abs(), rtol=1e-8, atol=0)


class Staged(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.stages = network

    def forward(self, x):
        return self.stages(x)


def test_modules_may_list_their_stages():
    torch.manual_seed(0)
    classifier, shape = dense_classifier()
    x = torch.randn(3, *shape)
    torch.testing.assert_close(robust_radius(Staged(classifier), x), robust_radius(classifier, x))


class Headed(nn.Module):
    """Lists some of what it applies as `stages`."""

    def __init__(self, network):
        super().__init__()
        self.stages, self.scale = network, 100.0

    def forward(self, x):
        return self.scale * self.stages(x)


def test_stages_that_are_not_all_that_a_module_applies_are_refused():
    classifier, shape = dense_classifier()
    with pytest.raises(ConfigError, match="Headed gives something else than its `stages` do"):
        robust_radius(Headed(classifier), torch.randn(3, *shape))


def test_the_radii_of_unrolled_layers_are_those_of_their_equilibria():
    torch.manual_seed(0)
    solved, shape = dense_classifier()
    unrolled = nn.Sequential(*solved)
    unrolled[2] = EquilibriumLayer(solved[2].map, gradient=Unrolled(1))
    solved[2].map.W.weight.data *= 10
    x = torch.randn(5, *shape)
    torch.testing.assert_close(robust_radius(unrolled, x), robust_radius(solved, x))


def test_classes_that_tie_have_a_radius_of_0():
    classifier, shape = dense_classifier()
    nn.init.zeros_(classifier[-1].weight)
    nn.init.zeros_(classifier[-1].bias)
    assert (robust_radius(classifier, torch.randn(3, *shape)) == 0).all()
    nn.init.constant_(classifier[-1].bias[:1], 1.0)
    assert torch.isinf(robust_radius(classifier, torch.randn(3, *shape))).all()


def test_a_batch_without_samples_has_no_radii():
    for make in (dense_classifier, convolutional_classifier):
        classifier, shape = make()
        assert robust_radius(classifier.eval(), torch.randn(0, *shape)).shape == (0,)


def test_the_classifier_is_left_as_it_was():
    classifier, shape = dense_classifier()
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    robust_radius(classifier, torch.randn(2, *shape))
    after = classifier.state_dict()
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items()
    )
    assert classifier[2].solver == Anderson()


def test_an_equilibrium_that_is_not_found_is_no_ground_for_a_radius(monkeypatch):
    classifier, shape = dense_classifier()
    for layer in classifier.modules():
        if isinstance(layer, EquilibriumLayer):
            layer.on_unconverged = "count"
    x = torch.randn(2, *shape)
    robust_radius(classifier, x)
    monkeypatch.setattr(robustness, "Anderson", lambda tol, max_steps: Anderson(tol, 2))
    with pytest.raises(ConvergenceError):
        robust_radius(classifier, x)


def test_refuses_what_it_cannot_bound():
    with pytest.raises(ConfigError, match="GELU"):
        robust_radius(nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), torch.randn(2, 4))
    with pytest.raises(ConfigError, match="Expected a torch module, got NoneType"):
        robust_radius(None, torch.randn(2, 4))
    with pytest.raises(ShapeError, match=r"logits of shape \(batch, classes\), got \(2, 3, 4, 4\)"):
        robust_radius(nn.Conv2d(1, 3, 3, padding=1), torch.randn(2, 1, 4, 4))
    for x, got in ((torch.ones(2, 4, dtype=torch.long), "torch.int64"), ([[1.0] * 4], "list")):
        with pytest.raises(ShapeError, match=f"a tensor of floating-point numbers, got {got}"):
            robust_radius(nn.Linear(4, 3), x)
    unit = OptEqUnit(Dense(3, 8), Dense(4, 8), max_norm=None)
    unit.W.weight.data *= 20
    unit.norm_checked = True
    with pytest.raises((ConfigError, ConvergenceError)):
        robust_radius(nn.Sequential(EquilibriumLayer(unit), nn.Linear(3, 2)), torch.randn(2, 4))
