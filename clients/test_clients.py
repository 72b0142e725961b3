"""What others have written, used on equilibrium layers as on any module: `make clients` installs and runs it.

Each test is skipped where its package is not installed. What they may warn of is theirs.
"""

import copy
import json
import pickle

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import opteq
from opteq.cli import main
from opteq.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("default")

TRAINED = 1437


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.images[:, None] / 16).float(), torch.tensor(data.target)


def make_network(U=None):
    torch.manual_seed(0)
    U = opteq.Conv2d(1, 16, 3) if U is None else U
    layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Conv2d(8, 16, 3), U), opteq.Anderson(tol=1e-4))
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(512, 10))


def train(network, loss_of, epochs=2):
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(TRAINED).split(64):
            optimizer.zero_grad()
            loss_of(network, rows).backward()
            optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def trained(digits):
    images, labels = digits
    return train(make_network(), lambda net, rows: cross_entropy(net(images[rows]), labels[rows]))


@pytest.fixture
def network(trained):
    return copy.deepcopy(trained)


def accuracy(network, images, labels):
    return (network(images).argmax(1) == labels).float().mean().item()


def test_captum_attributes_all_of_the_logit(network, digits):
    attr = pytest.importorskip("captum.attr")
    network = network.double()
    network[0].solver, network[0].gradient = opteq.Anderson(tol=1e-9, max_steps=200), opteq.Implicit(tol=1e-9)
    x = digits[0][1500:1504].double()
    blank, target = torch.zeros_like(x), network(x).argmax(1)
    parts = attr.IntegratedGradients(network).attribute(x, blank, target=target, n_steps=100)
    with torch.no_grad():
        rise = (network(x) - network(blank)).gather(1, target[:, None])[:, 0]
    # Completeness (Sundararajan et al. 2017): the parts sum to the whole, up to the quadrature.
    torch.testing.assert_close(parts.flatten(1).sum(1), rise, rtol=5e-3, atol=0)


def test_torchattacks_pgd_finds_adversaries(network, digits):
    torchattacks = pytest.importorskip("torchattacks")
    x, y = (part[TRAINED : TRAINED + 100] for part in digits)
    attacked = torchattacks.PGD(network, eps=0.1, alpha=0.02, steps=10)(x, y)
    assert (attacked - x).abs().max() <= 0.1 + 1e-6
    assert accuracy(network, attacked, y) < accuracy(network, x, y) - 0.2


def test_foolbox_pgd_finds_adversaries(network, digits):
    foolbox = pytest.importorskip("foolbox")
    x, y = (part[TRAINED : TRAINED + 100] for part in digits)
    model = foolbox.PyTorchModel(network, bounds=(0, 1))
    _, (attacked,), (found,) = foolbox.attacks.LinfPGD(steps=20)(model, x, y, epsilons=[0.1])
    assert (attacked - x).abs().max() <= 0.1 + 1e-6
    share = found.float().mean().item()
    assert share == pytest.approx(1 - accuracy(network, attacked, y))
    assert share > 1 - accuracy(network, x, y) + 0.05


def test_skorch_fits_clones_and_pickles(digits):
    skorch = pytest.importorskip("skorch")
    base = pytest.importorskip("sklearn.base")
    images, labels = (part.numpy() for part in digits)
    options = {"criterion": nn.CrossEntropyLoss, "optimizer": torch.optim.AdamW, "lr": 5e-3, "verbose": 0}
    classifier = skorch.NeuralNetClassifier(make_network, max_epochs=3, batch_size=64, **options)
    classifier.fit(images[:TRAINED], labels[:TRAINED])
    score = classifier.score(images[TRAINED:], labels[TRAINED:])
    assert score > 0.8
    assert pickle.loads(pickle.dumps(classifier)).score(images[TRAINED:], labels[TRAINED:]) == score
    assert not base.clone(classifier).initialized_


def test_accelerate_trains(digits):
    accelerate = pytest.importorskip("accelerate")
    images, labels = (part[:64] for part in digits)
    network, reference = make_network(), make_network()
    accelerator = accelerate.Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    prepared, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for x, y in loader:
        accelerator.backward(cross_entropy(prepared(x), y))
        optimizer.step()
    by_hand = torch.optim.SGD(reference.parameters(), 0.1)
    cross_entropy(reference(images), labels).backward()
    by_hand.step()
    found = accelerator.unwrap_model(prepared).state_dict()
    torch.testing.assert_close(found, reference.state_dict())


@pytest.mark.parametrize("way", ["cpu", "disk", "dispatch"])
@torch.no_grad()
def test_accelerate_offloads(network, digits, tmp_path, way):
    accelerate = pytest.importorskip("accelerate")
    # `W` is used within a solve, and not called: the layer is to have its weights from beginning to end.
    options = {"preload_module_classes": ["EquilibriumLayer"]}
    x = digits[0][:5]
    expected = network(x)
    if way == "cpu":
        away = accelerate.cpu_offload(network, execution_device=torch.device("cpu"), **options)
    elif way == "disk":
        away = accelerate.disk_offload(network, tmp_path, execution_device=torch.device("cpu"), **options)
    else:
        places = {"0": "disk", "1": "cpu", "2": "cpu"}
        away = accelerate.dispatch_model(
            network, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True, **options
        )
    assert next(away[0].parameters()).is_meta
    torch.testing.assert_close(away(x), expected)
    assert next(away[0].parameters()).is_meta


def test_peft_adapts_the_injection(digits):
    peft = pytest.importorskip("peft")
    images, labels = digits
    network = make_network(U=nn.Conv2d(1, 16, 3, padding=1))
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules=r".*injection\.operator"))
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    first = cross_entropy(adapted(images), labels).item()
    train(adapted, lambda net, rows: cross_entropy(net(images[rows]), labels[rows]), epochs=1)
    changed = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert len(changed) == 2
    assert all("lora" in name for name in changed)
    with torch.no_grad():
        logits = adapted(images)
        assert cross_entropy(logits, labels) < first
        torch.testing.assert_close(adapted.merge_and_unload()(images), logits, rtol=1e-3, atol=1e-3)


def test_laplace_of_the_last_layer(network, digits):
    laplace = pytest.importorskip("laplace")
    images, labels = digits
    loader = DataLoader(TensorDataset(images[:TRAINED], labels[:TRAINED]), batch_size=64)
    posterior = laplace.Laplace(network, "classification", "last_layer", "kron")
    posterior.fit(loader)
    posterior.optimize_prior_precision(method="marglik")
    x, y = images[TRAINED:], labels[TRAINED:]
    shares = posterior(x)
    torch.testing.assert_close(shares.sum(1), torch.ones(len(x)))
    assert (shares.argmax(1) == y).float().mean() == pytest.approx(accuracy(network, x, y), abs=0.02)
    # A posterior is less sure of itself than the weights that are its mean.
    with torch.no_grad():
        assert shares.amax(1).mean() < network(x).softmax(1).amax(1).mean()


def opacus_step(network, images, labels):
    opacus = pytest.importorskip("opacus")
    loader = DataLoader(TensorDataset(images, labels), batch_size=4)
    private, optimizer, _ = opacus.PrivacyEngine().make_private(
        module=network.train(),
        optimizer=torch.optim.SGD(network.parameters(), 0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    cross_entropy(private(images), labels).backward()
    return private, optimizer


def test_opacus_is_refused_where_it_would_miss_a_gradient(digits):
    with pytest.raises(ConfigError, match="Opacus collects the gradients of each sample"):
        opacus_step(make_network(), *(part[:4] for part in digits))


def test_opacus_has_the_gradient_of_each_sample_beside_a_frozen_operator(digits):
    images, labels = (part[:4] for part in digits)
    network = make_network().double()
    network[0].solver, network[0].gradient = opteq.Anderson(tol=1e-9, max_steps=200), opteq.Implicit(tol=1e-9)
    network[0].map.W.requires_grad_(False)
    reference = copy.deepcopy(network)
    private, optimizer = opacus_step(network, images.double(), labels)
    for sample in range(4):
        reference.zero_grad()
        cross_entropy(reference(images[sample : sample + 1].double()), labels[sample : sample + 1]).backward()
        for found, expected in zip(private.parameters(), reference.parameters(), strict=True):
            if expected.requires_grad:
                torch.testing.assert_close(found.grad_sample[sample], expected.grad, rtol=1e-6, atol=1e-9)
    optimizer.step()


def test_torchinfo_counts_all_parameters(network, digits):
    torchinfo = pytest.importorskip("torchinfo")
    summary = torchinfo.summary(network, input_data=digits[0][:2], verbose=0)
    assert summary.total_params == sum(p.numel() for p in network.parameters())
    assert "EquilibriumLayer" in str(summary)


def test_fvcore_counts_the_operations_of_iterations(network, digits):
    nn_ = pytest.importorskip("fvcore.nn")
    counted = {}
    for steps in (5, 10):
        network[0] = opteq.EquilibriumLayer(network[0].map, gradient=opteq.Unrolled(steps))
        counted[steps] = nn_.FlopCountAnalysis(network, digits[0][:1]).total()
    # An iteration is one product with W and one with its adjoint: 3×3 kernels of 8×16 channels, 64 pixels.
    assert counted[10] - counted[5] == 5 * 2 * 9 * 8 * 16 * 64


def test_optuna_searches_over_the_command(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-6, 1e-1, log=True)
        fit = ["fit", "--config", "digits", "--run", f"trial{trial.number}", "--report", "false"]
        short = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
        assert main([*fit, *short, "--model.learning_rate", f"{rate}"]) == 0
        return json.loads((tmp_path / f"runs/trial{trial.number}/summary.json").read_text())["test_accuracy"]

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"rate": 1e-6})
    study.optimize(objective, n_trials=3)
    assert study.best_value > study.trials[0].value + 0.2


def test_deepinv_restores_with_a_denoiser_that_is_an_equilibrium(digits):
    deepinv = pytest.importorskip("deepinv")
    optim = pytest.importorskip("deepinv.optim")
    images, _ = digits

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            unit = opteq.OptEqUnit(opteq.Conv2d(16, 32, 3), opteq.Conv2d(1, 32, 3))
            self.layer, self.out = opteq.EquilibriumLayer(unit), nn.Conv2d(16, 1, 3, padding=1)

        def forward(self, x, sigma=None):
            return x - self.out(self.layer(x))

    def loss(denoiser, rows):
        noisy = images[rows] + 0.3 * torch.randn_like(images[rows])
        return (denoiser(noisy) - images[rows]).square().mean()

    torch.manual_seed(0)
    prior = optim.PnP(denoiser=train(Denoiser(), loss, epochs=6))
    x = images[1500:1532]
    physics = deepinv.physics.Inpainting((1, 8, 8), mask=0.7, noise_model=deepinv.physics.GaussianNoise(0.03))
    restore = optim.optim_builder(
        iteration="PGD",
        prior=prior,
        data_fidelity=optim.L2(),
        max_iter=30,
        params_algo={"stepsize": 1.0, "g_param": 0.1},
    )
    y = physics(x)
    with torch.no_grad():
        restored = restore(y, physics)
    errors = [float((image - x).square().mean()) for image in (y, restored)]
    assert errors[1] < 0.7 * errors[0]


def test_lightning_stops_early_and_averages_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callbacks = "lightning.pytorch.callbacks"
    status = main(
        [
            *("fit", "--config", "digits", "--run", "one", "--report", "false"),
            *("--trainer.max_epochs", "6", "--trainer.enable_progress_bar", "false"),
            f"--trainer.callbacks+={callbacks}.EarlyStopping",
            *("--trainer.callbacks.monitor", "val_accuracy", "--trainer.callbacks.mode", "max"),
            *("--trainer.callbacks.min_delta", "1.0", "--trainer.callbacks.patience", "2"),
            *(f"--trainer.callbacks+={callbacks}.EMAWeightAveraging", "--trainer.callbacks.decay", "0.9"),
        ]
    )
    assert status == 0
    rows = (tmp_path / "runs/one/metrics.csv").read_text().splitlines()[1:]
    assert len(rows) == 3  # no accuracy rises by 1: two epochs after the first
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["test_accuracy"] > 0.5
