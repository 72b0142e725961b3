"""Results in float64, in float32 and under bfloat16 autocast."""

import pytest
import torch
from torch import Tensor

from opteq import (
    Anderson,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    OneStep,
    OptEqUnit,
    Phantom,
    Picard,
    Unrolled,
)
from opteq.errors import ConfigError
from tests.conformance.instances import MAPS, MapCase

every_map = pytest.mark.parametrize("case", MAPS.values(), ids=MAPS)
METHODS = {"implicit": Implicit(tol=1e-5, max_steps=200), "phantom": Phantom(), "onestep": OneStep()}


def run(layer: EquilibriumLayer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    z = layer(x)
    return z, list(torch.autograd.grad(z.square().sum(), [x, *layer.parameters()]))


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@every_map
def test_float32_is_close_to_float64(case: MapCase):
    x = case.inputs()
    exact, exact_gradients = run(
        EquilibriumLayer(case.map(), Anderson(1e-13, 1000), Implicit(1e-12, 500)).eval(), x
    )
    single = EquilibriumLayer(case.map().float(), Anderson(3e-6, 500), Implicit(3e-6, 500)).eval()
    value, gradients = run(single, x.float())
    assert value.dtype == torch.float32
    assert distance(value, exact) < 1e-4
    names = ["x", *(name for name, _ in single.named_parameters())]
    for name, gradient, expected in zip(names, gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        # A norm that is right to rounding comes with a singular vector right to the root of it.
        assert distance(gradient, expected) < (1e-2 if name.startswith("map.W.") else 1e-4)


@every_map
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_autocast_is_close_to_float32(case: MapCase, method):
    x = case.inputs().float()
    expected, expected_gradients = run(
        EquilibriumLayer(case.map().float(), Anderson(1e-5, 200), method).eval(), x
    )
    layer = EquilibriumLayer(case.map().float(), Picard(2e-2, 200), method).eval()
    with torch.autocast("cpu", torch.bfloat16):
        value, gradients = run(layer, x)
    assert value.dtype == torch.float32
    assert 0 < distance(value, expected) < 0.05  # bfloat16 keeps 8 bits
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert distance(gradient, reference) < 0.15


@every_map
def test_unrolled_under_autocast(case: MapCase):
    layer, x = EquilibriumLayer(case.map().float(), gradient=Unrolled(20)).eval(), case.inputs().float()
    expected, expected_gradients = run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradients = run(layer, x)
    assert 0 < distance(value, expected) < 0.05
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert distance(gradient, reference) < 0.15


@every_map
def test_a_tolerance_out_of_reach_is_refused(case: MapCase):
    x = case.inputs().float()
    with pytest.raises(ConfigError, match=r"tol=1e-07 cannot be reached in float32; use at least [12]e-06"):
        EquilibriumLayer(case.map().float(), Anderson(1e-7))(x)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match=r"tol=0\.0001 cannot be reached under bfloat16 autocast"),
    ):
        EquilibriumLayer(case.map().float(), Anderson(1e-4))(x)


@pytest.mark.parametrize(
    "build",
    [
        lambda: OptEqUnit(Dense(4, 6), Dense(3, 6), bias=False),
        lambda: GaussianMap(Dense(4, 6), Dense(3, 6), bias=False),
    ],
    ids=["unit", "gaussian"],
)
def test_the_state_keeps_its_precision_under_autocast(build):
    # A bias would widen the injection; without one the map must.
    layer = EquilibriumLayer(build(), Picard(2e-2), on_unconverged="count")
    with torch.autocast("cpu", torch.bfloat16):
        equation = layer.bind(torch.randn(2, 3))
        assert equation.tensors[0].dtype == torch.float32
        assert layer(torch.randn(2, 3)).dtype == torch.float32
