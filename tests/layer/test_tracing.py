"""Layers under tracers, compilers and transforms: right, or refused in one sentence."""

import warnings

import lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import func, nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.utils.tensorboard import SummaryWriter

from opteq import (
    Anderson,
    Conv2d,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    Implicit,
    MOptEq,
    OptEqUnit,
    Patches,
    Unrolled,
)
from opteq.errors import ConfigError

# PyTorch advises against tracing, and names every check of shapes and norms; forward mode uses it within.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning")


def branches():
    units = [OptEqUnit(Conv2d(6, 4), Conv2d(3, 4), max_norm=0.9) for _ in range(2)]
    return MOptEq(units, HeritageDiversity(0.02, tau=0.2))


MAPS = {
    "conv": (lambda: OptEqUnit(Conv2d(16, 16), Conv2d(3, 16)), (3, 16, 16)),
    "dense": (lambda: OptEqUnit(Dense(8, 16), Dense(4, 16)), (4,)),
    "gaussian": (
        lambda: GaussianMap(Conv2d(6, 8), Conv2d(3, 8), patches=Patches(4, 2), hidden=7),
        (3, 6, 4),
    ),
    "branches": (branches, (3, 8, 8)),
}


def solving():
    torch.manual_seed(0)
    return EquilibriumLayer(OptEqUnit(Dense(8, 16), Dense(4, 16)), Anderson(1e-3), Implicit(1e-3))


def tensors(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_the_trace_of_an_unrolled_layer_is_exact(name, training):
    torch.manual_seed(0)
    make, shape = MAPS[name]
    layer = EquilibriumLayer(make(), gradient=Unrolled(5)).train(training)
    layer(torch.randn(3, *shape))
    traced = torch.jit.trace(layer, torch.randn(4, *shape))
    for batch in (4, 7, 1):
        x = torch.randn(batch, *shape)
        for found, expected in zip(*map(tensors, (traced(x), layer(x))), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_trace_can_be_kept_has_gradients_and_refuses_other_sizes(tmp_path):
    layer, x = EquilibriumLayer(MAPS["conv"][0](), gradient=Unrolled(5)), torch.randn(4, 3, 16, 16)
    torch.jit.trace(layer, x).save(tmp_path / "trace.pt")
    loaded = torch.jit.load(tmp_path / "trace.pt")
    for found, expected in zip(step(loaded, x), step(layer, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"shape .* is invalid"):
        loaded(torch.randn(4, 3, 8, 8))


def test_a_solve_is_not_traced():
    with pytest.raises(ConfigError, match=r"cannot be traced.*gradient=Unrolled\(steps\)"):
        torch.jit.trace(solving(), torch.randn(4, 4))
    with pytest.raises(ConfigError, match=r"cannot be traced.*gradient=Unrolled\(steps\)"):
        torch.export.export(solving(), (torch.randn(4, 4),), strict=False)


def test_a_graph_for_tensorboard(tmp_path):
    x = torch.randn(4, 4)
    with SummaryWriter(tmp_path) as writer:
        with pytest.raises(ConfigError, match="cannot be traced"):
            writer.add_graph(solving(), x)
        writer.add_graph(EquilibriumLayer(solving().map, gradient=Unrolled(3)), x)
    assert any(path.stat().st_size > 1000 for path in tmp_path.iterdir())


class Module(lightning.LightningModule):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.example_input_array = torch.randn(4, 4)

    def forward(self, x):
        return self.layer(x)


def test_a_graph_for_the_logger_of_lightning(tmp_path):
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.raises(ConfigError, match="cannot be traced"):
        logger.log_graph(Module(solving()))
    logger.log_graph(Module(EquilibriumLayer(solving().map, gradient=Unrolled(3))))
    logger.finalize("success")


def step(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    value = model(x)
    value.square().sum().backward()
    return value.detach(), x.grad, *(p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("name", ["conv", "dense"])
def test_compiled_layers_are_right_and_leave_one_thing_to_python(name):
    torch.manual_seed(0)
    make, shape = MAPS[name]
    layers = [EquilibriumLayer(make(), Anderson(1e-3), Implicit(1e-3)) for _ in range(10)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh(), Down()) for layer in layers))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of PyTorch about itself, which hides it from all but those who take warnings for errors.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for batch in (4, 4, 2, 3, 5):
            x = torch.randn(batch, *shape)
            for found, expected in zip(step(compiled, x), step(model, x), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch._dynamo.reset()
        counters.clear()
        step(torch.compile(layers[0], backend="aot_eager"), x)
    assert len(counters["graph_break"]) == 1


class Down(nn.Module):
    """Makes of a layer's value the input of the next."""

    def forward(self, y):
        return 2 * y[:, : 3 if y.dim() == 4 else 4]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: func.vmap(lambda t: f(t[None])[0])(x),
        lambda f, x: func.grad(lambda t: f(t).sum())(x),
        lambda f, x: func.jvp(f, (x,), (x,)),
        lambda f, x: func.hessian(f)(x),
    ],
)
def test_a_solve_is_not_transformed(transform):
    with pytest.raises(ConfigError, match=r"not by torch.func; .* gradient=Unrolled\(steps\)"):
        transform(solving(), torch.randn(4, 4))


def dual(layer, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tangent_is_lost(frozen):
    layer, x, v = solving().requires_grad_(not frozen), torch.randn(4, 4), torch.randn(4, 4)
    with torch.set_grad_enabled(not frozen), pytest.raises(ConfigError, match="Unrolled"):
        dual(layer, x, v)
    # One that is not of the layer does not disturb it.
    with forward_ad.dual_level():
        forward_ad.make_dual(x, v)
        layer(x.clone())
    unrolled = EquilibriumLayer(layer.map.requires_grad_(False), gradient=Unrolled(40)).eval()
    _, expected = torch.autograd.functional.jvp(unrolled, x, v)  # by two passes backwards
    torch.testing.assert_close(dual(unrolled, x, v), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_cotangents_is_refused():
    with pytest.raises(NotImplementedError, match="one cotangent at a time"):
        torch.autograd.functional.jacobian(solving(), torch.randn(4, 4), vectorize=True)
