"""Where compiled code serves, and that it is passed around elsewhere."""

import pytest
import torch
from torch import func
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

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
    native,
)
from opteq.native.packed import Packed
from opteq.native.serving import reads, serves, takes

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor"),
    # PyTorch advises against tracing, and uses it within forward mode.
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
]

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def test_it_serves_where_an_error_is_allowed():
    assert serves(X, X, error=1e-6)
    assert not serves(X, error=0.0)


@pytest.mark.parametrize(
    "other",
    [
        X.double(),
        X.bfloat16(),
        X.to("meta"),
        X.to_sparse(),
        torch._neg_view(X),
        torch.view_as_complex(X.view(4, 3, 2)),
        X.clone().requires_grad_(),
        X.as_subclass(Subclass),
        FakeTensorMode().from_tensor(X),
    ],
    ids=["double", "bfloat16", "meta", "sparse", "negated", "complex", "attached", "subclass", "fake"],
)
def test_it_takes_nothing_but_plain_tensors(other):
    assert takes(X, X)
    assert not takes(X, other)


def test_a_graph_is_wanted_only_where_gradients_are_enabled():
    attached = X.clone().requires_grad_()
    with torch.no_grad():
        assert takes(attached)
    with torch.inference_mode():
        assert takes(X, X.clone())
    assert takes(torch.nn.Parameter(X, requires_grad=False))


def test_rows_may_lie_apart_but_not_their_numbers():
    wide = torch.randn(4, 20)
    assert reads(wide[:, 3:9])
    assert reads(X.T.contiguous()[:, :1])
    assert not reads(X.T)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def test_who_looks_at_operators_is_shown_those_of_pytorch(monkeypatch):
    seen = []

    def look(x):
        seen.append(takes(X))
        return x.clone()

    func.vmap(look)(X)
    func.grad(lambda x: look(x).sum())(X)
    func.jvp(look, (X,), (X,))
    torch.compile(look, backend="eager", fullgraph=True)(X)
    with forward_ad.dual_level():
        look(X)
    with torch.autocast("cpu"):
        look(X)
    with Watching():
        look(X)
    torch.jit.trace(look, X, check_trace=False)
    with monkeypatch.context() as patch:
        patch.setattr(native, "enabled", False)
        look(X)
    assert seen == [False] * 9
    look(X)
    assert seen[-1]


def test_gradients_of_a_batch_of_cotangents():
    bound = Conv2d(16, 16).bind((16, 12, 12), 0.9, 1e-3)
    x = torch.randn(2, 16, 12, 12, requires_grad=True)
    y = bound(x)
    assert type(y.grad_fn).__name__ == "_AttachedBackward"
    cotangents = torch.randn(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, x, c, retain_graph=True)[0] for c in cotangents]
    torch.testing.assert_close(found, torch.stack(single), rtol=1e-4, atol=1e-4)


def test_a_rough_operator_is_transformed_as_any_other():
    bound = Conv2d(16, 16).requires_grad_(False).bind((16, 12, 12), 0.9, 1e-3)
    x, v = torch.randn(3, 16, 12, 12), torch.randn(3, 16, 12, 12)
    exact = torch.nn.functional.conv2d(v, bound.tensors[0], padding=1)
    assert not torch.equal(bound(v), exact)  # in C
    torch.testing.assert_close(func.vmap(lambda t: bound(t[None])[0])(v), exact)
    torch.testing.assert_close(func.jvp(bound, (x,), (v,))[1], exact)
    with forward_ad.dual_level(), torch.no_grad():
        tangent = forward_ad.unpack_dual(bound(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, exact)


def test_a_packed_matrix_is_multiplied_where_it_cannot_be_in_c():
    matrix, x = torch.randn(20, 33), torch.randn(8, 20)
    packed = Packed(matrix)
    with Watching():
        torch.testing.assert_close(packed(x), x @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(func.vmap(lambda t: packed(t[None])[0])(x), x @ matrix, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(packed(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(gradient, matrix.sum(1).expand(8, 20), rtol=1e-5, atol=1e-5)


def gaussian():
    return GaussianMap(Conv2d(16, 32), Conv2d(3, 32), patches=Patches(8, 2), hidden=20)


def branches():
    units = [OptEqUnit(Conv2d(16, 16), Conv2d(3, 16), max_norm=0.8) for _ in range(3)]
    return MOptEq(units, HeritageDiversity(0.02, tau=0.2))


LAYERS = {
    "conv": (lambda: OptEqUnit(Conv2d(16, 32), Conv2d(3, 32)), (4, 3, 16, 16)),
    "dense": (lambda: OptEqUnit(Dense(64, 64), Dense(8, 64)), (256, 8)),
    "gaussian": (gaussian, (4, 3, 16, 16)),
    "branches": (branches, (8, 3, 16, 16)),
}


def layer(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    made, x = EquilibriumLayer(make(), Anderson(1e-3), Implicit(1e-3)), torch.randn(shape)
    made(x)  # norms are estimated once
    return made, x.requires_grad_()


def total(solution):
    values = solution.value if isinstance(solution.value, tuple) else (solution.value,)
    return sum(value.square().sum() for value in values)


@pytest.mark.parametrize("name", LAYERS)
def test_operations_are_counted_as_without_it(name, monkeypatch):
    counts = []
    for enabled in (True, False):
        monkeypatch.setattr(native, "enabled", enabled)
        made, x = layer(name)
        with FlopCounterMode(display=False) as counter:
            solution = made.solve(x)
            forward = counter.get_total_flops()
            total(solution).backward()
        counts.append((solution.info.evaluations, forward, counter.get_total_flops()))
    assert counts[0] == counts[1]
    assert 0 < counts[0][1] < counts[0][2]


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("conv", {"winograd_convolve", "winograd_transformed", "winograd_weight_gradient"}),
        ("dense", {"packed", "packed_gram", "packed_multiply"}),
        ("gaussian", {"winograd_convolve", "forces"}),
        ("branches", {"winograd_convolve", "packed_each"}),
    ],
)
def test_profilers_see_it_by_name(name, operators):
    made, x = layer(name)
    expected = made.solve(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        solution = made.solve(x)
        total(solution).backward()
    assert torch.equal(total(solution), total(expected))
    events = {e.key.removeprefix("opteq::"): e for e in profile.key_averages() if e.key.startswith("opteq::")}
    operators = operators | {"rows_observe", "rows_judge", "rows_mix", "rows_descend", "rows_turn"}
    if name == "branches":
        operators -= {"rows_descend", "rows_turn"}
    assert operators <= events.keys()
    assert all(event.self_cpu_time_total > 0 for event in events.values())
    # One judgement for an evaluation; forwards, and backwards where that is Anderson's method.
    assert events["rows_judge"].count >= solution.info.evaluations
