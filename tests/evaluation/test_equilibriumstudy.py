"""What an equilibrium is worth, against loops over the equations as the papers write them."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel
from torch import nn

import opteq
from opteq.errors import ConfigError
from opteq.evaluation.equilibriumreport import as_json, figures, tables
from opteq.evaluation.equilibriumstudy import STEPS, KernelRecord, _Moments, study_equilibrium
from opteq.models.bodies import Coupled, Deep, Equilibrium, Gaussian, Kernel, Stack, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.stems import ConvStem

pytestmark = pytest.mark.spec("R7.9")

CLASSES, CHANNELS, SIDE, SAMPLES = 300, 4, 4, 60
DOMAIN = (CHANNELS, SIDE, SIDE)


def conv(inputs, outputs, kernel_size=3):
    return opteq.Conv2d(inputs, outputs, kernel_size, start=opteq.operators.starts.GaussianStart(0.3))


def unit(hidden=6, **options):
    made = opteq.OptEqUnit(conv(CHANNELS, hidden), conv(CHANNELS, hidden), **{"max_norm": 0.99} | options)
    if made.injection.bias is not None:
        nn.init.normal_(made.injection.bias, std=0.3)
    return made


def network(body, branches=1):
    """A classifier whose many classes tell apart states that differ little; the stem leaves images alone."""
    head = Head(CHANNELS, CLASSES, branches, norm=False, pool=2)
    nn.init.zeros_(head[-1].bias)
    return ImageClassifier(nn.Identity(), body, head).eval()


@pytest.fixture(autouse=True)
def _seeded():
    # In double precision, so that little is left to rounding.
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def images(count=SAMPLES):
    return torch.randn(count, *DOMAIN, generator=torch.Generator().manual_seed(1))


def batches(x, labels, size=25):
    return list(zip(x.split(size), labels.split(size), strict=True))


# The maps as the papers write them, with the weights as they act.


def acting(operator, ceiling):
    return operator.bind(DOMAIN, ceiling).tensors[0].detach()


def unit_map(unit):
    """`z ↦ Wᵀ max(W z + U x + b, 0)`."""
    W, U = acting(unit.W, unit.max_norm), unit.injection.operator.weight
    b = unit.injection.bias

    def preactivation(x, z):
        return F.conv2d(z, W, padding=1) + F.conv2d(x, U, b, padding=1)

    return preactivation, lambda x, z: F.conv_transpose2d(preactivation(x, z).clamp(min=0), W, padding=1)


def gaussian_map(kernel):
    """`y ↦ max(e^{-γ‖r‖²} Wᵀr, 0)` with `r = U x - W y` and `γ` fixed."""
    W, U = acting(kernel.W, kernel.max_norm), kernel.injection.operator.weight

    def step(x, y):
        r = F.conv2d(x, U, padding=1) - F.conv2d(y, W, padding=1)
        weight = torch.exp(-kernel.gamma * r.square().sum((1, 2, 3), keepdim=True))
        return (weight * F.conv_transpose2d(r, W, padding=1)).clamp(min=0)

    return step


def deep_step(units, alphas):
    maps = [unit_map(u)[1] for u in units]

    def step(x, z):
        for f, alpha in zip(maps, alphas, strict=True):
            z = alpha * f(x, z) + (1 - alpha) * z
        return z

    return step


def cases():
    units = [unit(5), unit(7)]
    # Distances are of some hundreds.
    kernel = opteq.GaussianMap(conv(CHANNELS, 6), conv(CHANNELS, 6), gamma=2e-3, bias=False, max_norm=0.99)
    single = unit(activation="relu")
    wide, wide_maps = opteq.WideOptEq(units), [unit_map(u)[1] for u in units]
    skip = opteq.MoreauSkip(single, 0.6)
    shrunk = opteq.Regularised(single, opteq.SquaredNorm(), gamma=0.3)
    zero = torch.zeros_like
    return {
        "unit": (single, unit_map(single)[1], zero),
        "deep": (opteq.DeepOptEq(units, alpha=[0.3, 0.7]), deep_step(units, [0.3, 0.7]), zero),
        "from the input": (
            opteq.DeepOptEq(units, alpha=0.4, start="input"),
            deep_step(units, [0.4, 0.4]),
            torch.clone,
        ),
        "wide": (wide, lambda x, z: sum(f(x, z) for f in wide_maps) / 2, zero),
        "skip": (skip, lambda x, z: 0.6 * unit_map(single)[1](x, z) + 0.4 * z, zero),
        "regularised": (shrunk, lambda x, z: unit_map(single)[1](x, z - 0.3 * z), zero),
        "gaussian": (kernel, gaussian_map(kernel), zero),
    }


NAMES = ("unit", "deep", "from the input", "wide", "skip", "regularised", "gaussian")


@torch.no_grad()
def states(step, start, x, count):
    z, found = start(x), []
    for _ in range(count):
        z = step(x, z)
        found.append(z)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_accuracies_and_residuals_are_those_of_the_iteration_written_out(name):
    equilibrium_map, step, start = cases()[name]
    model, x = network(Equilibrium(equilibrium_map, opteq.Anderson(tol=1e-10))), images()
    along = states(step, start, x, 400)
    with torch.no_grad():
        answers = [model.head(along[k - 1]).argmax(1) for k in STEPS]
        answers.append(model.head(along[-1]).argmax(1))
    # Each answer is the truth for some of the images, so that no two of the accuracies need agree.
    which = torch.arange(SAMPLES) % len(answers)
    labels = torch.stack(answers)[which, torch.arange(SAMPLES)]
    expected = [float((answer == labels).double().mean()) for answer in answers]
    assert len(set(expected)) >= (2 if name == "wide" else 3)

    record = study_equilibrium(model, batches(x, labels))
    assert (record.samples, record.steps) == (SAMPLES, STEPS)
    assert [*record.accuracy, record.full_accuracy] == pytest.approx(expected, abs=1e-12)

    for answer, gain in zip(answers, record.gains, strict=False):
        right = (answers[-1] == labels).double(), (answer == labels).double()
        interval = ttest_rel(*right).confidence_interval(0.95)
        found = gain.mean - gain.half_width, gain.mean + gain.half_width
        if not torch.equal(*right):
            assert found == pytest.approx((interval.low, interval.high), abs=1e-12)
        assert (gain.mean, gain.pairs) == (pytest.approx(float((right[0] - right[1]).mean())), SAMPLES)

    before = [start(x), *along[:20]]
    change = np.array(
        [
            [
                float((b - a).double().norm() / b.double().norm().clamp(min=1e-300))
                for a, b in zip(*pair, strict=True)
            ]
            for pair in zip(before, along[:21], strict=True)
        ]
    )
    (layer,) = record.layers
    assert layer.residual.shape == (3, 21)
    np.testing.assert_allclose(
        layer.residual, np.quantile(change, [0.1, 0.5, 0.9], axis=1), rtol=1e-6, atol=1e-13
    )


def test_all_layers_iterate_at_once():
    first, second = unit(), unit(5)
    solver = opteq.Anderson(tol=1e-10)
    model, x = network(Stack([Equilibrium(first, solver), Equilibrium(second, solver)])), images()
    maps = [unit_map(u)[1] for u in (first, second)]
    with torch.no_grad():
        answers = []
        for k in (*STEPS, 400):
            features = x
            for step in maps:
                features = states(step, torch.zeros_like, features, k)[-1]
            answers.append(model.head(features).argmax(1))
    labels = answers[1].clone()
    labels[::2] = answers[-1][::2]
    expected = [float((answer == labels).double().mean()) for answer in answers]
    assert len(set(expected)) >= 3
    record = study_equilibrium(model, batches(x, labels))
    assert [*record.accuracy, record.full_accuracy] == pytest.approx(expected, abs=1e-12)
    assert [layer.name for layer in record.layers] == ["body.0", "body.1"]
    assert [layer.input_norm != record.layers[0].input_norm for layer in record.layers] == [False, True]


def test_active_units_are_counted_and_sizes_measured():
    single = unit()
    model, x = network(Equilibrium(single, opteq.Anderson(tol=1e-10))), images()
    preactivation, step = unit_map(single)
    z = states(step, torch.zeros_like, x, 400)[-1]
    record = study_equilibrium(model, batches(x, torch.zeros(SAMPLES, dtype=torch.long)))
    (layer,) = record.layers
    with torch.no_grad():
        active = (preactivation(x, z) > 0).sum().item() / (SAMPLES * 6 * SIDE**2)
        pooled = F.adaptive_avg_pool2d(z, 2).flatten(1).numpy()
    assert 0.2 < active < 0.8
    assert layer.active == (pytest.approx(active, abs=1e-9),)
    norms = np.sort(x.flatten(1).norm(dim=1).numpy())
    assert layer.input_norm == pytest.approx((norms[(SAMPLES - 1) // 2], norms[-1]), rel=1e-7)
    norms = np.sort(z.flatten(1).norm(dim=1).numpy())
    assert layer.output_norm == pytest.approx((norms[(SAMPLES - 1) // 2], norms[-1]), rel=1e-7)
    assert layer.scale == (pytest.approx(np.sqrt((z.numpy().astype(float) ** 2).mean()), rel=1e-7),)
    assert record.head_scale == pytest.approx(np.sqrt((pooled.astype(float) ** 2).mean()), rel=1e-7)
    eigenvalues = np.linalg.eigvalsh(np.corrcoef(np.moveaxis(z.numpy(), 1, 0).reshape(len(z[0]), -1)))
    effective = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert 1.01 < effective < len(z[0]) - 0.01
    assert layer.channels == ((len(z[0]), pytest.approx(effective, rel=1e-4)),)


@pytest.mark.parametrize(("dead", "effective"), [((), 2.0), ((1,), 1.0), ((0, 1), math.nan)])
def test_channels_that_never_vary_are_not_counted(dead: tuple[int, ...], effective: float):
    # Two channels without correlation.
    first, second = torch.tensor([1.0, -1, 1, -1]), torch.tensor([1.0, 1, -1, -1])
    moments = _Moments()
    z = torch.stack([first, second], 1)
    z[:, list(dead)] = 7.3
    moments.add(z[:2])
    moments.add(z[2:])
    assert moments.effective == pytest.approx(effective, rel=1e-6, nan_ok=True)
    moments = _Moments()
    moments.add(torch.stack([first, 3 * first + 2], 1))
    assert moments.effective == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("tanh", lambda a: 1.0), ("hardtanh", lambda a: (a.abs() < 1).double().mean().item())],
)
def test_active_are_units_whose_slope_does_not_vanish(activation, expected):
    single = unit(activation=activation)
    model, x = network(Equilibrium(single, opteq.Anderson(tol=1e-10))), 2 * images()
    (layer,) = study_equilibrium(model, batches(x, torch.zeros(SAMPLES, dtype=torch.long))).layers
    with torch.no_grad():
        share = expected(unit_map(single)[0](x, model.body(x)))
    assert layer.active == (pytest.approx(share, abs=1e-9),)
    assert activation == "tanh" or share < 0.95


BODIES = {
    "unit": (lambda: Unit(CHANNELS, 6), 1, 1),
    "deep": (lambda: Deep(CHANNELS, (3, 4, 5), learn_alpha=True), 1, 3),
    "regularised": (lambda: Deep(CHANNELS, (3, 4), regulariser=opteq.SquaredNorm()), 1, 2),
    "parallel": (lambda: Unit(CHANNELS, (3, 4), reductions=(1, 2)), 2, 2),
    "coupled": (lambda: Coupled(CHANNELS, (3, 4), reductions=(1, 2)), 2, 2),
    "gauss-seidel": (lambda: Coupled(CHANNELS, (3, 4), sweep="gauss-seidel"), 2, 2),
    "coupled kernels": (lambda: Coupled(CHANNELS, (3, 4), kernel="sigmoid"), 2, 2),
    "kernel": (lambda: Kernel(CHANNELS, 5), 1, 1),
    "gaussian": (lambda: Gaussian(CHANNELS, (8, 16), reductions=(1, 2)), 2, 2),
    "wide": (lambda: Equilibrium(opteq.WideOptEq([unit(), unit(3)])), 1, 2),
    "multi-block": (lambda: Equilibrium(opteq.MultiBlockOptEq(opteq.DeepOptEq([unit(), unit(3)]))), 2, 2),
    "affine": (lambda: Equilibrium(opteq.AffineChange(unit(), 2 * torch.eye(CHANNELS))), 1, 1),
    "mixed": (lambda: Equilibrium(mixing()), 1, 1),
    "skip": (lambda: Equilibrium(opteq.MoreauSkip(opteq.GaussianMap(conv(4, 8), conv(4, 8)), 0.7)), 1, 1),
    "unrolled": (lambda: Unit(CHANNELS, 6, gradient=opteq.Unrolled(3)), 1, 1),
}


def mixing():
    return opteq.LinearMixing(conv(CHANNELS, 3), conv(CHANNELS, 3), torch.eye(3) + 0.2)


def dense(operator, domain, ceiling):
    bound = operator.bind(domain, ceiling)
    bound = bound.with_tensors(tuple(t.detach().double() for t in bound.tensors))
    size = math.prod(domain)
    return bound(torch.eye(size, dtype=torch.float64).view(size, *domain)).flatten(1).mT


@pytest.mark.parametrize("name", BODIES)
def test_every_body_shows_its_operators_as_they_act_and_its_units(name):
    make, branches, units = BODIES[name]
    model = network(body := make(), branches)
    record = study_equilibrium(model, batches(images(6), torch.zeros(6, dtype=torch.long)))
    (layer,) = record.layers
    assert layer.map == type(body.map).__name__
    operators = [n for n in layer.operators if not n.startswith("W_h")]
    assert len(operators) == units
    assert len(layer.active) == units
    assert len(layer.scale) == branches
    assert (layer.residual[1, 1:] < 2).all()
    # The operators of the map, in the order of its units.
    maps = [
        m
        for m in body.map.modules()
        if isinstance(getattr(m, "W", None), opteq.operators.base.LinearOperator)
    ]
    for own, spectrum in zip(maps, layer.spectra, strict=False):
        ceiling = own.max_norm * (math.sqrt(0.5) if type(own) is opteq.KernelMap else 1)
        expected = torch.linalg.svdvals(dense(own.W, spectrum.domain, ceiling))
        torch.testing.assert_close(spectrum.values, expected[: len(spectrum.values)], rtol=1e-7, atol=1e-7)
    json.dumps(as_json(record), allow_nan=False)
    assert all(len(row) == len(t.header) for t in tables(record) for row in t.rows)


def test_a_share_is_spread_over_all_images():
    model = network(Unit(CHANNELS, 6))
    x, labels = images(12), torch.arange(12) % 3
    for share, kept in ((0.5, slice(None, None, 2)), (0.25, slice(None, None, 4)), (1.0, slice(None))):
        of_all = study_equilibrium(model, batches(x, labels, 5), share=share)
        expected = study_equilibrium(model, batches(x[kept], labels[kept], 12))
        assert (of_all.samples, of_all.accuracy) == (expected.samples, expected.accuracy)


def test_learnt_weights_of_skip_connections():
    model = network(body := Deep(CHANNELS, (3, 4, 5), alpha=0.5, learn_alpha=True))
    logits = [-1.0, 0.5, 2.0]
    for skip, logit in zip(body.map.skips, logits, strict=True):
        nn.init.constant_(skip.logit, logit)
    (layer,) = study_equilibrium(model, batches(images(4), torch.zeros(4, dtype=torch.long))).layers
    assert layer.alpha == pytest.approx([1 / (1 + math.exp(-v)) for v in logits], rel=1e-6)


def test_a_map_of_the_users_own_has_what_there_is():
    own = opteq.SimilarityMap(
        lambda y, c: -0.1 * torch.log1p((c - y).square()).flatten(1).sum(1),
        conv(CHANNELS, CHANNELS),
        CHANNELS,
    )
    record = study_equilibrium(
        network(Equilibrium(own)), batches(images(6), torch.zeros(6, dtype=torch.long))
    )
    (layer,) = record.layers
    assert (layer.operators, layer.spectra, layer.kernels) == ((), (), ())
    assert len(layer.active) == 1
    assert "unit 1" in "\n".join(map(str, tables(record)))


# The remarks of Li et al. 2023.


def remarks(beta, gamma, W, U, b, classifier, size):
    """The formulas of Propositions 2 and 3 and of Remarks 1 and 2, written again."""
    mu, m = np.max([U, W, classifier, b]), W**2
    sides = (
        np.array([beta * mu, 2 * mu * beta + 1]) / (1 - beta * m),
        1 / (1 - m),
    )
    larger = max(U, W)
    rate = beta * larger**2 + np.sqrt(gamma) * size * larger**3
    return mu, (*sides[0], sides[1]), (rate / (1 - rate), larger / (1 - larger**2))


@pytest.mark.parametrize("patched", [False, True])
def test_the_quantities_of_the_remarks_are_those_of_the_batch(patched):
    options = {"patches": opteq.Patches(2, 2), "hidden": 3} if patched else {"gamma": 0.02}
    kernel = opteq.GaussianMap(conv(CHANNELS, 6), conv(CHANNELS, 6), max_norm=0.9, **options)
    nn.init.normal_(kernel.injection.bias, std=0.1)
    model, x = network(Equilibrium(kernel, opteq.Anderson(tol=1e-10))), images()
    (layer,) = study_equilibrium(model, batches(x, torch.zeros(SAMPLES, dtype=torch.long))).layers
    (found,) = layer.kernels

    with torch.no_grad():
        y = model.body(x)
        W, U = acting(kernel.W, 0.9), kernel.injection.operator.weight
        c = F.conv2d(x, U, kernel.injection.bias, padding=1)
        r = (c - F.conv2d(y, W, padding=1)).double().numpy()
        start = c.double().numpy()
        projection = None
        if patched:
            projection = kernel.projection.double().numpy()
            projection = projection / max(1.0, np.linalg.norm(projection, 2))

    def distances(values):
        """`‖r_i W_h‖²` of every patch, by loops over places and groups of channels."""
        if not patched:
            return (values.reshape(SAMPLES, -1) ** 2).sum(1)[:, None]
        rows = []
        for g in range(0, 6, 2):
            for i in range(0, SIDE, 2):
                for j in range(0, SIDE, 2):
                    block = values[:, g : g + 2, i : i + 2, j : j + 2].transpose(0, 2, 3, 1)
                    rows.append(((block.reshape(SAMPLES, -1) @ projection) ** 2).sum(1))
        return np.stack(rows, 1)

    gamma = np.full(SAMPLES, 0.02)
    if patched:
        nearest = distances(start)
        gamma = 0.2 / np.maximum(nearest.min(1), 0.01 * nearest.mean(1))
    beta = np.exp(-gamma[:, None] * distances(r)).max()
    factor = np.linalg.norm(projection, 2) if patched else 1.0
    norms = [
        factor * np.linalg.norm(dense(op, DOMAIN, z).numpy(), 2)
        for op, z in ((kernel.W, 0.9), (kernel.injection.operator, None))
    ]
    bias = factor * np.linalg.norm(np.tile(kernel.injection.bias.detach().numpy(), SIDE**2))
    classifier = np.linalg.norm(model.head[-1].weight.detach().numpy(), 2)
    size = max(x.flatten(1).norm(dim=1).max().item(), y.flatten(1).norm(dim=1).max().item())

    assert found.largest_weight == pytest.approx(beta, rel=1e-7)
    assert found.gamma == pytest.approx(gamma.max(), rel=1e-7)
    assert [found.W_norm, found.U_norm] == pytest.approx(norms, rel=1e-7)
    assert found.bias_norm == pytest.approx(bias, rel=1e-7)
    assert found.classifier_norm == pytest.approx(classifier, rel=1e-7)
    assert found.size == pytest.approx(size, rel=1e-7)
    mu, sides, _ = remarks(beta, gamma.max(), *norms, bias, classifier, size)
    assert found.norm == pytest.approx(mu, rel=1e-7)
    assert found.generalization == pytest.approx(sides, rel=1e-7)


@pytest.mark.parametrize(
    ("numbers", "first", "second"),
    [
        ((0.5, 0.01, 0.97, 0.95, 0.1, 0.9, 0.5), True, True),
        ((0.81, 0.01, 0.97, 0.95, 0.1, 0.9, 0.5), False, False),
        ((0.5, 0.01, 0.8, 0.7, 0.1, 0.85, 0.5), False, True),  # m and μ are too small
        ((0.5, 0.05, 0.97, 0.95, 0.1, 0.9, 0.5), True, False),  # √γ is 0.22
        ((0.5, 0.01, 0.97, 0.95, 0.1, 0.9, 1.2), True, False),  # B is too large
        ((0.5, 0.01, 0.97, 0.95, 1.3, 0.9, 0.5), False, True),  # ‖b‖ makes μ larger than 1
    ],
)
def test_when_the_remarks_apply_and_what_they_say(numbers, first, second):
    kernel = KernelRecord(*numbers)
    mu, sides, lipschitz = remarks(*numbers)
    assert kernel.norm == mu
    assert kernel.generalization == pytest.approx(sides, rel=1e-12)
    assert kernel.lipschitz == pytest.approx(lipschitz, rel=1e-12)
    assert (kernel.remark1, kernel.remark2) == (first, second)
    if first:
        assert max(sides[:2]) <= sides[2]


def test_what_is_not_known_or_does_not_apply_is_no_number():
    kernel = KernelRecord(0.5, 0.01, 0.9, math.nan, 0.0, 0.9, 0.5)
    assert math.isnan(kernel.norm)
    assert all(math.isnan(v) for v in kernel.lipschitz)
    assert not kernel.remark1
    assert all(math.isnan(v) for v in KernelRecord(0.5, 0.01, 1.0, 0.9, 0.0, 0.9, 0.5).generalization)
    foreign = opteq.GaussianMap(conv(CHANNELS, 6), nn.Conv2d(CHANNELS, 6, 3, padding=1), gamma=0.02)
    record = study_equilibrium(
        network(Equilibrium(foreign)), batches(images(4), torch.zeros(4, dtype=torch.long))
    )
    assert math.isnan(record.layers[0].kernels[0].U_norm)
    assert as_json(record)["layers"][0]["kernels"][0]["U_norm"] is None


# The network and its data.


def test_nothing_of_the_network_changes():
    model = ImageClassifier(ConvStem(CHANNELS, CHANNELS), Unit(CHANNELS, 6), Head(CHANNELS, 5))
    model.train()
    frozen = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    body = model.body
    body.on_unconverged = "raise"
    before = {name: t.clone() for name, t in model.state_dict().items()}
    parts = body.solver, body.gradient
    modes = [m.training for m in model.modules()]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images(8), torch.zeros(8, dtype=torch.long)), 4
    )
    drawn = torch.get_rng_state()
    study_equilibrium(model, loader)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert (body.solver, body.gradient) == parts
    assert body.on_unconverged == "raise"
    assert [m.training for m in model.modules()] == modes
    assert not frozen.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_failure_half_way_leaves_the_network_as_it_was():
    model = network(Unit(CHANNELS, 6))
    parts = model.body.gradient, model.body.on_unconverged
    calls = []

    def fail(*_):
        calls.append(model.body.gradient)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model.head.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        study_equilibrium(model, batches(images(4), torch.zeros(4, dtype=torch.long)))
    assert calls[-1] != parts[0]
    assert (model.body.gradient, model.body.on_unconverged) == parts
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_scenes_are_judged_by_their_pixels():
    head = nn.Conv2d(CHANNELS, 7, 1)
    model = ImageClassifier(
        nn.Identity(), Equilibrium(single := unit(), opteq.Anderson(tol=1e-10)), head
    ).eval()
    x = images(9)
    labels = torch.randint(-1, 7, (9, SIDE, SIDE))
    along = states(unit_map(single)[1], torch.zeros_like, x, 400)
    known = labels >= 0
    expected = []
    for z in [*(along[k - 1] for k in STEPS), along[-1]]:
        answer = F.conv2d(z, head.weight, head.bias).argmax(1)
        expected.append(((answer == labels) & known).sum().item() / known.sum().item())
    record = study_equilibrium(model, batches(x, labels, 4))
    assert [*record.accuracy, record.full_accuracy] == pytest.approx(expected, abs=1e-12)
    assert [gain.mean for gain in record.gains] == pytest.approx([expected[-1] - a for a in expected[:-1]])
    assert math.isnan(record.head_scale)


@pytest.mark.parametrize(
    ("body", "loader", "message"),
    [
        (nn.Identity, batches(images(4), torch.zeros(4, dtype=torch.long)), "no equilibrium layer"),
        (lambda: Unit(CHANNELS, 6), [], "test set is empty"),
        (lambda: Unit(CHANNELS, 6), batches(images(4), torch.full((4,), -1)), "test set is empty"),
    ],
)
def test_what_cannot_be_studied_is_refused(body, loader, message):
    with pytest.raises(ConfigError, match=message):
        study_equilibrium(network(body()), loader)


@pytest.mark.parametrize(
    ("readout", "channels", "read"),
    [("state", CHANNELS, "equilibrium z*"), ("hidden", 6, "hidden variable y*")],
)
def test_sizes_are_of_what_is_read(readout, channels, read):
    body = Unit(CHANNELS, 6, readout=readout)
    model = ImageClassifier(nn.Identity(), body, Head(channels, CLASSES)).eval()
    record = study_equilibrium(model, batches(images(6), torch.zeros(6, dtype=torch.long)))
    assert [row[0] for row in tables(record)[-1].rows][1] == read


def test_a_gain_without_an_interval_says_so():
    model = network(Unit(CHANNELS, 6))
    record = study_equilibrium(model, batches(images(1), torch.zeros(1, dtype=torch.long)))
    assert all(cell.endswith(" ± –") for cell in tables(record)[0].rows[1][1:-1])


def test_json_tables_and_figures():
    model = network(Gaussian(CHANNELS, (8, 16), patch_channels=4), 2)
    record = study_equilibrium(model, batches(images(6), torch.zeros(6, dtype=torch.long)))
    assert [name for name, _, _ in figures(record)] == ["accuracy", "residual", "spectra", "units"]
    stored = json.loads(json.dumps(as_json(record)))
    assert stored["accuracy"] == list(record.accuracy)
    (layer,), (own,) = stored["layers"], record.layers
    assert layer["spectra"][0]["values"] == own.spectra[0].values.tolist()
    assert layer["kernels"][1]["largest_weight"] == own.kernels[1].largest_weight
    assert layer["kernels"][1]["generalization"] == list(own.kernels[1].generalization)
    lines = "\n\n".join(map(str, tables(record))).splitlines()
    accuracy = next(line.split() for line in lines if line.strip().startswith("accuracy"))
    assert accuracy[1:] == [f"{a:.2%}" for a in (*record.accuracy, record.full_accuracy)]
    assert any(line.strip().startswith("gain of z*, points ± 95 %  ") for line in lines)
    first = next(line.split() for line in lines if line.strip().startswith("W1"))
    assert first[-1] == f"{own.active[0]:.1%}"
    assert f"{own.spectra[0].largest:.3f}" in first
