"""What matters most, on the device that OPTEQ_TEST_DEVICE names, against plain iteration on the processor."""

import copy

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD

import opteq
from opteq import Anderson, Broyden, Conv2d, Dense, EquilibriumLayer, Implicit, Nesterov, OptEqUnit, Picard
from opteq.errors import ShapeError
from opteq.evaluation.attacks import PGD, attacked_accuracy
from opteq.evaluation.record import evaluate
from opteq.evaluation.saliency import grad_cam
from opteq.models.loading import ModelCard
from tests.conformance.instances import COMPOSED_MAPS, ESTIMATED_MAPS, MAPS, MapCase
from tests.conformance.reference import random
from tests.conformance.test_norms import WAYS

CASES = MAPS | ESTIMATED_MAPS | COMPOSED_MAPS
SOLVERS = {
    "picard": Picard(tol=1e-12, max_steps=2000),
    "anderson": Anderson(tol=1e-12, max_steps=2000),
    "broyden": Broyden(tol=1e-12, max_steps=2000),
    "nesterov": Nesterov(tol=1e-12, max_steps=2000),
}
PLAIN_STEPS = 600


def plain(map, x):
    """The equilibrium by plain iteration, every step in the graph."""
    equation = map.bind(x)
    z = equation.initial()
    for _ in range(PLAIN_STEPS):
        z = equation(z)
    return equation.readout(z)


def map_and_input(case="unit-dense"):
    return CASES[case].map(), CASES[case].inputs()


def on(device, values):
    assert {t.device.type for t in values} == {device.type}
    return [t.detach().cpu() for t in values]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_plain_iteration(device, case: MapCase):
    map, x = case.map(), case.inputs().requires_grad_()
    expected = plain(map, x)
    cotangent = random(*expected.shape, seed=7)
    expected_gradients = torch.autograd.grad((expected * cotangent).sum(), [x, *map.parameters()])
    layer = EquilibriumLayer(
        copy.deepcopy(map).to(device),
        Anderson(tol=1e-13, max_steps=2000),
        Implicit(tol=1e-12, max_steps=500),
    )
    y = x.detach().to(device).requires_grad_()
    value = layer(y)
    gradients = torch.autograd.grad((value * cotangent.to(device)).sum(), [y, *layer.parameters()])
    torch.testing.assert_close(*on(device, [value]), expected.detach(), rtol=1e-9, atol=1e-9)
    for gradient, wanted in zip(on(device, gradients), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_solvers(device, solver):
    map, x = map_and_input("unit-conv-tanh")
    expected = plain(map, x).detach()
    solution = EquilibriumLayer(map.to(device), solver).solve(x.to(device), trace=True)
    assert bool(solution.info.converged.all())
    torch.testing.assert_close(*on(device, [solution.value]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gradient", [opteq.OneStep(), opteq.Phantom(), opteq.Unrolled(600)], ids=repr)
def test_other_gradients_point_the_same_way(device, gradient):
    map, x = map_and_input()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(plain(map, x).sum(), [map.W.weight])
    layer = EquilibriumLayer(copy.deepcopy(map).to(device), gradient=gradient)
    layer(x.detach().to(device)).sum().backward()
    (found,) = on(device, [layer.map.W.weight.grad])
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.8


@pytest.mark.parametrize("way", [way for way in WAYS if way.certified or way == opteq.Ceiling()], ids=repr)
def test_norms_are_kept_through_training(device, way):
    torch.manual_seed(0)
    map = OptEqUnit(Conv2d(3, 4, 3, norm=way), Conv2d(2, 4, 3), max_norm=0.9).to(device)
    layer, x = EquilibriumLayer(map), random(4, 2, 5, 4, dtype=torch.float32).to(device)
    optimizer = SGD(layer.parameters(), lr=0.3)
    for _ in range(3):
        opteq.settle_norms(layer)
        optimizer.zero_grad()
        (-layer(x).square().mean()).backward()
        optimizer.step()
    bound = map.double().W.bind((3, 5, 4), 0.9)
    columns = bound(torch.eye(60, dtype=torch.float64, device=device).reshape(60, 3, 5, 4)).flatten(1)
    (matrix,) = on(device, [columns])
    norm = np.linalg.svd(matrix.numpy(), compute_uv=False)[0]
    assert norm <= bound.norm_bound().item() * (1 + 1e-9)
    assert 0 < norm <= 0.9 * (1 + 1e-3)


def test_certificates_hold(device):
    map, x = map_and_input("unit-conv-tanh")
    exact = plain(map, x).detach()
    layer = EquilibriumLayer(map.to(device), Picard(tol=1e-2))
    certificate = opteq.certify(layer, x.to(device))
    # The numbers may be on the processor, wherever the states are.
    bound, contraction = certificate.distance.value.cpu(), certificate.contraction.value.cpu()
    (z,) = on(device, [certificate.state])
    distance = (z - exact).flatten(1).norm(dim=1)
    assert (distance > 1e-6).all()
    assert (distance <= bound).all()
    assert (contraction < 1).all()


def test_no_attack_within_the_certified_radius_changes_the_class(device):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(6, 9), Dense(8, 9), max_norm=0.8)
    layer = EquilibriumLayer(unit, Anderson(tol=1e-12, max_steps=500))
    classifier = nn.Sequential(layer, nn.Linear(6, 3)).double().to(device).eval()
    x = random(16, 8).to(device)
    radius = opteq.robust_radius(classifier, x)
    assert radius.device.type == device.type
    assert (radius > 0).all()
    labels = classifier(x).argmax(1)
    for seed in range(5):
        push = random(16, 8, seed=seed).to(device)
        for _ in range(10):
            push = (push / push.norm(dim=1, keepdim=True)).requires_grad_()
            logits = classifier(x + radius[:, None] * push)
            assert torch.equal(logits.argmax(1), labels)
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), push)
            push = (push + 10 * gradient).detach()


def test_a_pretrained_classifier_knows_its_digits(device):
    digits = load_digits()
    card = ModelCard.read("digits")
    images = (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - card.mean[0]) / card.std[0]
    labels = torch.tensor(digits.target)
    network = opteq.load("digits").to(device)
    batches = list(zip(images[:200].split(100), labels[:200].split(100), strict=True))
    record = evaluate(network, batches, card.class_names, (card.mean, card.std), device)
    assert record.accuracy() > 0.98
    assert record.unconverged == 0
    images, labels = images[:50].to(device), labels[:50].to(device)
    assert grad_cam(network, images).shape == (50, 8, 8)
    attack = PGD(steps=5, epsilon=0.3, step_size=0.1)
    assert attacked_accuracy(network, [(images, labels)], attack, (card.mean, card.std)) < record.accuracy()


def test_a_classifier_learns(device):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:128], dtype=torch.float32, device=device)[:, None] / 8 - 1
    labels = torch.tensor(digits.target[:128], device=device)
    network = copy.deepcopy(opteq.load("digits"))
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    network.to(device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        opteq.settle_norms(network)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    assert (network(images).argmax(1) == labels).double().mean() > 0.8


@pytest.mark.parametrize("where", ["the input", "the layer", "both"])
def test_devices_that_do_not_fit_are_named(device, where):
    map, x = map_and_input()
    layer = EquilibriumLayer(map.to(device if where == "the input" else "meta"))
    x = x.to(device if where == "the layer" else "meta")
    with pytest.raises(ShapeError, match="meta") as raised:
        layer(x)
    assert "\n" not in str(raised.value)
    said = "preload_module_classes" if where == "the layer" else "moved there by to_empty"
    assert said in str(raised.value)
