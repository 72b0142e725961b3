import copy
import random

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parametrizations, prune

from opteq.errors import ConfigError, ShapeError
from opteq.models.converter import Slots, from_feedforward

# What torch says of even kernels, once.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


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
        for p in (*unit.W.weights, *unit.injection.operator.parameters())
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
        (Slots(9, (), slice(2, 5), slice(5, 9), nn.Linear(4, 3, bias=False)), (9,)),
        (Slots(6, ("H", "W"), slice(0, 2), slice(3, 6), nn.Conv2d(3, 2, 3, 1, 1, bias=False)), (6, 3, 4)),
        (
            Slots(
                30,
                (),
                slice(0, 4),
                slice(5, 30),
                nn.Sequential(
                    nn.Unflatten(1, (1, 5, 5)),
                    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
                    nn.Conv2d(1, 1, 2, bias=False),
                    nn.Flatten(),
                ),
            ),
            (30,),
        ),
        (Slots(7, (), slice(0, 3), slice(3, 6), nn.Flatten()), (7,)),
        (Slots(7, (), slice(2, 3)), (7,)),
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
    assert bound.quick_norm_bound() <= 2.5 * norm
    x = torch.randn(2, *shape, dtype=torch.float64)
    torch.testing.assert_close(operator(x), bound(x))
    if bound.tensors:
        value = (y * bound(x)).sum() + (y.flip(0) * bound(2 * x)).sum()
        expected = torch.autograd.grad(value, bound.tensors)
        torch.testing.assert_close(bound.weight_gradient((x, y), (2 * x, y.flip(0))), expected)
    else:
        assert bound.weight_gradient((x, y)) == ()


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x) + 1


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Reversed(nn.Sequential):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


class Block(nn.Sequential):
    """As torchvision builds its own: a constructor, and nothing else."""

    def __init__(self, before, after):
        super().__init__(nn.Linear(before, after), nn.ReLU())


def with_hook(register):
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    register(network)
    return network


def patched():
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    network[0].forward = lambda x: x
    return network


SEQUENCE = "known to its own class alone; put modules of torch.nn into a torch.nn.Sequential"
REFUSED = {
    "not a chain": (nn.Bilinear(3, 3, 3), "Expected a torch.nn.Sequential.*got a Bilinear"),
    "nothing": (nn.Sequential(), "Expected a network with layers, got one without any"),
    "activation": (
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.ReLU()),
        r"layer 1 \(GELU.*monotone",
    ),
    "unknown throughout": (nn.Sequential(nn.Linear(3, 3), nn.GELU()), r"layer 1 \(GELU.*monotone"),
    "steep activation": (
        nn.Sequential(nn.Linear(3, 3), nn.ELU(2.0), nn.Linear(3, 3), nn.ReLU()),
        r"layer 1 \(ELU",
    ),
    "early linear softplus": (nn.Sequential(nn.Linear(3, 3), nn.Softplus(1, 1)), r"layer 1 \(Softplus"),
    "capped": (nn.Sequential(nn.Linear(3, 3), nn.ReLU6()), r"layer 1 \(ReLU6"),
    "max pool inside": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2), nn.ReLU()),
        r"layer 1 \(MaxPool2d",
    ),
    "batch norm in training": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()),
        r"layer 1 \(BatchNorm2d.*in training mode; call eval\(\)",
    ),
    "batch norm without statistics": (
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.ReLU()).eval(),
        r"layer 1 \(BatchNorm1d.*without running statistics",
    ),
    "dropout in training": (
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2)),
        r"layer 2 \(Dropout.*in training mode",
    ),
    "head": (
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Softmax(1)),
        r"layer 2 \(Softmax.*after the last activation",
    ),
    "misfit": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(3, 4), nn.ReLU()),
        "layer 2 .*4 channels come before it",
    ),
    "lazy": (nn.Sequential(nn.LazyLinear(3), nn.ReLU()), "run its lazy modules on an input"),
    "own linear": (nn.Sequential(OwnLinear(3, 3), nn.ReLU()), rf"layer 0 \(OwnLinear.*{SEQUENCE}"),
    "own activation": (nn.Sequential(nn.Linear(3, 3), OwnReLU()), rf"layer 1 \(OwnReLU.*{SEQUENCE}"),
    "own sequence": (
        nn.Sequential(Residual(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)),
        rf"layer 0 \(Residual\).*{SEQUENCE}",
    ),
    "own order": (Reversed(nn.Linear(3, 3), nn.ReLU()), rf"the network \(Reversed\).*{SEQUENCE}"),
    "own head": (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), OwnLinear(3, 3)), rf"layer 2 .*{SEQUENCE}"),
    "patched": (patched(), rf"layer 0 \(Linear.*{SEQUENCE}"),
    "hook": (
        with_hook(lambda n: n[1].register_forward_hook(lambda m, x, y: 2 * y)),
        r"layer 1 \(ReLU\(\)\): it has hooks",
    ),
    "pre-hook": (
        with_hook(lambda n: n[0].register_forward_pre_hook(lambda m, x: 2 * x[0])),
        "layer 0.*hooks",
    ),
    "hook of the whole": (
        with_hook(lambda n: n.register_forward_hook(lambda m, x, y: y + 1)),
        r"the network \(Sequential\): it has hooks",
    ),
    "backward hook": (
        with_hook(lambda n: n[2].register_full_backward_hook(lambda m, a, b: None)),
        "layer 2.*hooks",
    ),
    "old weight norm": (
        with_hook(lambda n: torch.nn.utils.spectral_norm(n[0])),
        r"layer 0 .*hooks.*remove_weight_norm",
    ),
    "pruned": (with_hook(lambda n: prune.random_unstructured(n[0], "weight", 0.5)), "layer 0 .*hooks"),
    "weight norm": (
        with_hook(lambda n: parametrizations.weight_norm(n[2])),
        r"layer 2 \(ParametrizedLinear\): it is parametrized.*remove_parametrizations",
    ),
}


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize(("network", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("x", [None, torch.zeros(2, 3)], ids=["any size", "an input"])
def test_what_cannot_be_converted_is_named(network, message, x):
    if x is not None:
        message = message.replace(
            "4 channels come before it", r"it cannot follow what has the shape \(batch, 4\)"
        )
        x = torch.zeros(2, 1, 4, 4) if any(isinstance(m, nn.Conv2d) for m in network.modules()) else x
    with pytest.raises(ConfigError, match=message):
        from_feedforward(network, x)


NEED_AN_INPUT = {
    "stride": nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3, 2, padding=1)), nn.ReLU()),
    "large padding": nn.Sequential(nn.Conv2d(1, 2, 3, 2, padding=9), nn.ReLU()),
    "no padding": nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
    "valid padding": nn.Sequential(nn.Conv2d(1, 2, 3, padding="valid"), nn.ReLU()),
    "dilation": nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2, padding=1), nn.ReLU()),
    "one side": nn.Sequential(nn.Conv2d(1, 2, (3, 5), padding=1), nn.ReLU()),
    "pool": nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(2), nn.ReLU()),
    "mixed": nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()),
    "flatten inside": nn.Sequential(nn.Linear(6, 2), nn.Flatten(), nn.ReLU()),
    "activation first": nn.Sequential(nn.ReLU(), nn.Linear(6, 4)),
}


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("network", NEED_AN_INPUT.values(), ids=NEED_AN_INPUT)
def test_what_changes_sizes_needs_an_input(network):
    with pytest.raises(ConfigError, match=r"layer \S+ .*without an input of known shape.*give one"):
        from_feedforward(network)
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(from_feedforward(network, x)(x), network(x))


def settled(*parts):
    """The network in float64 and eval mode, its batch norms with statistics and weights of their own."""
    network = nn.Sequential(*parts).double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.3, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return network.eval()


# Every one is for images of two channels.
CONVERTED = {
    "flatten, linear": (nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3)),
    "convolutions, then linear": (
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(12, 5),
        nn.ReLU(), nn.Linear(5, 3),
    ),
    "average pools": (
        nn.AvgPool2d(2), nn.Conv2d(2, 3, 2), nn.AvgPool2d(2, 1, 1, count_include_pad=False), nn.Sigmoid(),
        nn.AdaptiveAvgPool2d((2, 1)), nn.Conv2d(3, 2, (2, 1)), nn.Softplus(), nn.AdaptiveAvgPool2d(1),
    ),
    "dilation and groups": (
        nn.Conv2d(2, 4, 3, dilation=2, groups=2, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(4, 6, 2, groups=2),
        nn.Hardtanh(),
    ),
    "even kernels": (
        nn.Conv2d(2, 3, 2, padding="same"), nn.ReLU(), nn.Conv2d(3, 2, 4, 2, 1), nn.Softshrink(0.05),
    ),
    "kernels of two sizes": (nn.Conv2d(2, 3, (1, 3), (2, 1)), nn.ReLU(), nn.Conv2d(3, 2, (3, 2)), nn.Tanh()),
    "growing": (nn.ConvTranspose2d(2, 3, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(3, 1, 2), nn.Tanh()),
    "paddings": (
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.ReplicationPad2d((1, 0, 2, 1)),
        nn.Conv2d(3, 2, 3, padding=2, padding_mode="circular"), nn.Tanh(), nn.ZeroPad2d(1),
        nn.CircularPad2d(2), nn.ReflectionPad2d(1),
        nn.Conv2d(2, 2, 5, padding="same", padding_mode="replicate"), nn.ReLU(),
    ),
    "batch norms": (
        nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(),
        nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 2, 3, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(72, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2),
    ),
    "dropout and identity": (
        nn.Identity(), nn.Dropout2d(), nn.Conv2d(2, 3, 3), nn.Identity(), nn.Dropout(), nn.ReLU(),
        nn.Flatten(), nn.Dropout(), nn.Linear(48, 3),
    ),
    "only affine": (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
    "only linear": (nn.Linear(6, 4), nn.Linear(4, 3)),
    "only shapes": (nn.AvgPool2d(2), nn.Flatten()),
    "on the last dimension": (nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(), nn.Flatten(2)),
    "back to images": (
        nn.Flatten(), nn.Linear(72, 12), nn.ReLU(), nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 2, 2), nn.Tanh(),
    ),
    "activations in a row": (nn.ReLU(), nn.Tanh(), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.ELU(), nn.Sigmoid()),
    "a constructor of its own": (nn.Flatten(), Block(72, 4), Block(4, 3)),
    "maxima at the end": (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(3), nn.Flatten()),
}  # fmt: skip


@pytest.mark.spec("R2.6")
@pytest.mark.parametrize("parts", CONVERTED.values(), ids=CONVERTED)
def test_the_output_is_that_of_the_network(parts):
    torch.manual_seed(0)
    network, x = settled(*parts), torch.randn(4, 2, 6, 6, dtype=torch.float64)
    converted = from_feedforward(network, x[:1])
    torch.testing.assert_close(converted(x), network(x), rtol=1e-11, atol=1e-12)
    info = converted.equilibrium.solve(x).info
    assert info.evaluations == 1
    assert (info.residual == 0).all()


def random_network(draw: random.Random):
    """Up to four layers on images of two channels and three on vectors, most of them with an activation."""
    parts, channels, size = [], 2, 6
    for _ in range(draw.randint(0, 4)):
        kind = draw.choice(["conv", "conv", "conv", "pool", "norm", "pad", "transposed"])
        if kind == "conv":
            groups, wider = draw.choice([1, channels]), draw.randint(1, 3)
            width = channels * wider if groups > 1 else wider
            options = {
                "stride": draw.choice([1, 1, 2]), "padding": draw.choice([0, 1]), "groups": groups,
                "dilation": draw.choice([1, 1, 2]), "bias": draw.random() < 0.7,
                "padding_mode": draw.choice(["zeros", "zeros", "reflect", "circular", "replicate"]),
            }  # fmt: skip
            parts.append(nn.Conv2d(channels, width, draw.choice([1, 2, 3]), **options))
            channels = width
        else:
            parts += {
                "pool": [nn.AvgPool2d(2, draw.choice([1, 2]), draw.choice([0, 1]))],
                "norm": [nn.BatchNorm2d(channels)],
                "pad": [draw.choice([nn.ZeroPad2d, nn.ReflectionPad2d, nn.CircularPad2d])(1)],
                "transposed": [nn.ConvTranspose2d(channels, channels, 2, draw.choice([1, 2]))],
            }[kind]
        if draw.random() < 0.7:
            parts.append(draw.choice([nn.ReLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Softshrink])())
    sizes = nn.Sequential(*parts)(torch.zeros(2, 2, size, size)).shape
    parts.append(draw.choice([nn.Flatten(), nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())]))
    features = sizes[1] * (4 if isinstance(parts[-1], nn.Sequential) else sizes[2] * sizes[3])
    for _ in range(draw.randint(0, 3)):
        parts.append(nn.Linear(features, features := draw.randint(1, 5)))
        if draw.random() < 0.7:
            parts.append(draw.choice([nn.ReLU, nn.Tanh, nn.Hardtanh, nn.Softplus])())
    return settled(*parts)


@pytest.mark.spec("R2.6")
def test_random_networks_are_converted_exactly():
    torch.manual_seed(0)
    draw, x, converted = random.Random(0), torch.randn(3, 2, 6, 6, dtype=torch.float64), 0
    for _ in range(60):
        try:
            network = random_network(draw)
        except (RuntimeError, ValueError):  # the images have become too small
            continue
        error = (from_feedforward(network, x)(x) - network(x)).abs().max()
        assert error <= 1e-11 * network(x).abs().max().clamp(min=1), network
        converted += 1
    assert converted > 40


@pytest.mark.spec("R2.6")
def test_networks_that_keep_the_size_take_images_of_any_size():
    torch.manual_seed(0)
    network = settled(
        nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, padding=2, dilation=2), nn.ReLU(), nn.ReLU(), nn.Dropout2d(),
        nn.Conv2d(3, 4, (1, 5), padding=(0, 2), padding_mode="circular"), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Conv2d(4, 2, 2, padding="same", groups=2), nn.Conv2d(2, 5, 1, padding="valid", bias=False),
        nn.ELU(), nn.AdaptiveAvgPool2d(2),
    )  # fmt: skip
    converted = from_feedforward(network)
    for sides in ((6, 6), (9, 5)):
        x = torch.randn(3, 2, *sides, dtype=torch.float64)
        torch.testing.assert_close(converted(x), network(x), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(from_feedforward(network, x)(x), network(x), rtol=1e-11, atol=1e-12)
    vectors = settled(nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3), nn.ReLU())
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(from_feedforward(vectors)(x), vectors(x), rtol=1e-11, atol=1e-12)


@pytest.mark.spec("R2.6")
def test_gradients_are_those_of_the_network():
    torch.manual_seed(0)
    network = settled(*CONVERTED["convolutions, then linear"])
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    converted = from_feedforward(network, x)
    weight = torch.randn(3, 3, dtype=torch.float64)
    wanted = [x, *network.parameters()]
    units = converted.equilibrium.map.units[1:]
    parameters = [p for u in units for p in (*u.W.weights, *u.injection.operator.parameters())]
    ours = [x, *parameters, *converted.head.parameters()]
    expected = torch.autograd.grad((network(x) * weight).sum(), wanted)
    computed = torch.autograd.grad((converted(x) * weight).sum(), ours)
    for a, b in zip(computed, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert sum(p.numel() for p in converted.parameters()) == sum(p.numel() for p in network.parameters())


@pytest.mark.spec("R2.6")
def test_hidden_units_of_images_hold_the_activations_layer_by_layer():
    torch.manual_seed(0)
    network = settled(*CONVERTED["convolutions, then linear"])
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    converted = from_feedforward(network, x)
    ends = (2, 4, 7)
    for state, slot, end in zip(converted.hidden_units(x), converted.slots, ends, strict=True):
        torch.testing.assert_close(state[:, slot], network[:end](x).flatten(1))
    torch.testing.assert_close(converted.features(x), network[:7](x))


@pytest.mark.spec("R2.6")
def test_a_converted_network_is_a_module_like_any_other():
    torch.manual_seed(0)
    network, x = settled(*CONVERTED["batch norms"]).float(), torch.randn(3, 2, 6, 6)
    converted, expected = from_feedforward(network, x), network(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(converted).train()
    torch.testing.assert_close(twin(x), expected, rtol=1e-4, atol=1e-5)
    for parameter in twin.parameters():
        parameter.data.zero_()
    twin.load_state_dict(converted.state_dict())
    torch.testing.assert_close(twin(x), converted(x))
    with torch.autocast("cpu", torch.bfloat16):
        rough = from_feedforward(settled(*CONVERTED["convolutions, then linear"]).float(), x)
        rough.equilibrium.solver = type(rough.equilibrium.solver)(tol=0.05)
        assert rough(x).shape == (3, 3)
    with torch.no_grad():
        network[1].weight.zero_()
    torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_another_shape_are_refused():
    network = settled(*CONVERTED["convolutions, then linear"])
    converted = from_feedforward(network, torch.zeros(1, 2, 6, 6))
    with pytest.raises(ShapeError, match=r"inputs of shape \(2, 6, 6\), got \(2, 7, 7\); convert"):
        converted(torch.randn(3, 2, 7, 7, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"Expected `x` to be a tensor of shape \(batch, ...\), got \(6,\)"):
        from_feedforward(network, torch.zeros(6))
    with pytest.raises(ShapeError, match="got list"):
        from_feedforward(network, [1.0])
    # As torch has it, these would be images without a batch.
    with pytest.raises(ConfigError, match=r"layer 0 .*it cannot follow what has the shape \(batch, 6, 6\)"):
        from_feedforward(network, torch.zeros(2, 6, 6))
    with pytest.raises(ConfigError, match=r"layer 0 .*Flatten.*it cannot follow what has the shape"):
        from_feedforward(nn.Sequential(nn.Flatten(0), nn.ReLU()), torch.zeros(2, 6))
    # A matrix for each sample, where vectors are expected.
    dense = from_feedforward(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(ShapeError, match=r"Expected `U` to give \(batch, 3\) as `W` does, got \(2, 3, 3\)"):
        dense(torch.zeros(2, 3, 4))
