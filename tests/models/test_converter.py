import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from opteq.errors import ConfigError
from opteq.models.converter import Slots, from_feedforward
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense


def digits():
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8 - 1
    return images, torch.tensor(bunch.target)


def dense_network():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.ReLU(),
        nn.Linear(48, 32),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(32, 10),
    )


def convolutional_network():
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding="same", groups=2), nn.ReLU()
        ),
        nn.Sequential(
            nn.Conv2d(16, 12, 1, bias=False), nn.LeakyReLU(0.1), nn.Conv2d(12, 16, 5, padding=2), nn.ELU()
        ),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("make", [dense_network, convolutional_network])
def test_a_network_trained_on_digits_and_its_equilibrium_agree_on_every_test_image(make):
    torch.manual_seed(0)
    network, (images, labels) = make(), digits()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(6):
        for rows in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    network.eval()
    expected = network(images[1400:])
    assert (expected.argmax(1) == labels[1400:]).float().mean() > 0.85

    converted = from_feedforward(network)
    logits = converted(images[1400:])
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= 1e-5


CHAINS = {
    "one layer": nn.Sequential(nn.Linear(5, 4), nn.Tanh()),
    "one layer and a head": nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)),
    "two layers": nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.Softplus(), nn.Linear(4, 6), nn.Softshrink(0.1)
    ),
    "a linear layer inside": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 3)),
    "four layers": nn.Sequential(
        nn.Linear(5, 4),
        nn.ReLU(),
        nn.Linear(4, 6),
        nn.Hardtanh(),
        nn.Linear(6, 2),
        nn.LeakyReLU(),
        nn.Linear(2, 7),
        nn.Tanh(),
    ),
}


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("network", CHAINS.values(), ids=CHAINS.keys())
def test_the_map_forgets_the_state_and_is_solved_in_one_evaluation(network):
    torch.manual_seed(0)
    network = network.double()
    converted = from_feedforward(network)
    x = torch.randn(3, 5, dtype=torch.float64)
    layer = converted.equilibrium
    info = layer.solve(x).info
    assert info.evaluations == 1
    assert (info.residual == 0).all()
    equation = layer.bind(x)
    z = equation(equation.initial())
    torch.testing.assert_close(equation(10 * torch.randn_like(z)), z, rtol=0, atol=0)
    torch.testing.assert_close(converted(x), network(x))


@pytest.mark.spec("R2.6")
def test_hidden_units_hold_the_activations_layer_by_layer():
    torch.manual_seed(0)
    network = CHAINS["four layers"].double()
    converted = from_feedforward(network)
    x = torch.randn(3, 5, dtype=torch.float64)
    states = converted.hidden_units(x)
    for layer, (state, slot) in enumerate(zip(states, converted.slots, strict=True), start=1):
        torch.testing.assert_close(state[:, slot], network[: 2 * layer](x))
    # The states are those of units z ↦ W̄ᵀσ(W̄ z + c), recomputed here from dense matrices.
    z = torch.zeros_like(states[0])
    for index, state in enumerate(states):
        linear, activation = network[2 * index], network[2 * index + 1]
        lift = torch.zeros(linear.out_features, z.shape[1], dtype=z.dtype)
        lift[:, converted.slots[index]] = torch.eye(linear.out_features, dtype=z.dtype)
        if index:
            lift[:, converted.slots[index - 1]] = linear.weight.detach()
        injection = linear.bias if index else linear(x)
        z = activation(z @ lift.mT + injection) @ lift
        torch.testing.assert_close(state, z)


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("index", [0, 4])
def test_gradients_reach_the_weights_and_the_input(index):
    torch.manual_seed(0)
    network = list(CHAINS.values())[index].double()
    converted = from_feedforward(network)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(network(x).square().sum(), (x, *network.parameters()))
    output = converted(x)
    parameters = [
        p
        for unit in converted.equilibrium.map.units[1:]
        for p in (*(unit.W.weights or unit.injection.operator.weights), unit.injection.bias)
    ]
    gradients = torch.autograd.grad(output.square().sum(), (x, *parameters))
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.spec("R2.6")
def test_a_module_that_occurs_twice_is_converted_twice():
    torch.manual_seed(0)
    layer, activation = nn.Linear(5, 5), nn.Tanh()
    network = nn.Sequential(layer, activation, layer, activation, nn.Linear(5, 3), activation)
    converted, x = from_feedforward(network), torch.randn(4, 5)
    assert len(converted.slots) == 3
    torch.testing.assert_close(converted(x), network(x))


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("index", [0, 4])
def test_the_map_and_its_derivative_leave_their_arguments_alone(index):
    converted, x = from_feedforward(list(CHAINS.values())[index].double()), torch.randn(3, 5).double()
    equation = converted.equilibrium.bind(x)
    for part in (equation, *equation.units):
        z, v = torch.randn(2, *part.initial().shape, dtype=torch.float64)
        kept = z.clone(), v.clone()
        part(z)
        linearization = part.linearize(z)
        linearization.jvp(v)
        linearization.vjp(v)
        linearization.pullback(v)
        assert torch.equal(z, kept[0])
        assert torch.equal(v, kept[1])


def test_the_weights_are_copies_and_no_random_numbers_are_used():
    network = dense_network()
    state = torch.get_rng_state()
    converted = from_feedforward(network.eval())
    assert torch.equal(torch.get_rng_state(), state)
    assert not converted.training
    x = torch.rand(2, 1, 8, 8)
    before = converted(x)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(converted(x), before)


@pytest.mark.spec("R2.7")
@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        (Slots(9, (), slice(2, 5), slice(5, 9), Dense(4, 3)), (9,)),
        (Slots(6, ("H", "W"), slice(0, 2), slice(3, 6), Conv2d(3, 2)), (6, 3, 4)),
    ],
)
def test_the_slots_operator_against_its_dense_matrix(operator, shape):
    bound = operator.double().bind(shape)
    basis = torch.eye(torch.Size(shape).numel(), dtype=torch.float64)
    matrix = bound(basis.reshape(-1, *shape)).flatten(1).mT
    y = torch.randn(2, *bound.codomain, dtype=torch.float64)
    torch.testing.assert_close(bound.adjoint(y).flatten(1), y.flatten(1) @ matrix)
    norm = torch.linalg.matrix_norm(matrix, 2)
    assert norm <= min(bound.norm_bound(), bound.quick_norm_bound())
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(operator(x), bound(x))
    expected = torch.autograd.grad((y * bound(x)).sum(), bound.tensors)
    torch.testing.assert_close(bound.weight_gradient((x, y)), expected)


REFUSED = {
    "not a chain": (nn.Bilinear(3, 3, 3), "Expected a torch.nn.Sequential.*got a Bilinear"),
    "no activation": (nn.Sequential(nn.Linear(3, 3)), "without an activation"),
    "activation": (
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.ReLU()),
        r"layer 1 \(GELU.*monotone",
    ),
    "steep activation": (
        nn.Sequential(nn.Linear(3, 3), nn.ELU(2.0), nn.Linear(3, 3), nn.ReLU()),
        r"layer 1 \(ELU",
    ),
    "stride": (
        nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3, 2, padding=1)), nn.ReLU()),
        r"layer 0\.0 \(Conv2d.*stride 1",
    ),
    "padding": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), "keeps height and width"),
    "dilation": (nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2, padding=2), nn.ReLU()), "no dilation"),
    "even kernel": (nn.Sequential(nn.Conv2d(1, 2, 2, padding="same"), nn.ReLU()), "odd square kernel"),
    "wrapping": (
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU()),
        "zero padding",
    ),
    "mixed": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()),
        "all Linear or all Conv2d",
    ),
    "pool inside": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2), nn.ReLU()), r"layer 1 \(MaxPool2d"),
    "batch norm": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()), "fuse_conv_bn_eval"),
    "head": (
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Softmax(1)),
        r"layer 2 \(Softmax.*after the last activation",
    ),
    "misfit": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(3, 4), nn.ReLU()),
        "layer 2 .*4 channels come before it",
    ),
    "lazy": (nn.Sequential(nn.LazyLinear(3), nn.ReLU()), "run its lazy modules on an input"),
    "no layer": (nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), r"layer 0 \(ReLU"),
    "two activations": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Tanh()), r"layer 2 \(Tanh.*at most one"),
}


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize(("network", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_converted_is_named(network, message):
    with pytest.raises(ConfigError, match=message):
        from_feedforward(network)
