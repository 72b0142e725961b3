import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import nn

from opteq.data.digits import Digits
from opteq.errors import ConfigError, OpteqError
from opteq.evaluation.attacks import PGD
from opteq.models.bodies import Coupled, Stack, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.stems import ConvStem
from opteq.objectives.coupling import HeritageDiversity
from opteq.solvers.anderson import Anderson
from opteq.training.meter import TrainingMeter
from opteq.training.module import ClassifierModule
from tests.networks import branch_classifier, unit_classifier


def small_network(**options):
    torch.manual_seed(0)
    return unit_classifier(in_channels=1, **options)


def deep_network():
    return ImageClassifier(ConvStem(1, 4), Stack([Unit(4, 4), Unit(4, 4)]), Head(4, 10))


def make_trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", enable_model_summary=False, **{**quiet, **options})


@pytest.fixture
def data():
    return Digits(batch_size=64, train_limit=128)


@pytest.fixture(autouse=True)
def _third_party_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*LeafSpec")
        yield


def predictions(network, loader):
    """Logits, labels and solve infos, by a plain loop over a loader."""
    network.eval()
    logits, labels, infos = [], [], []
    with torch.no_grad():
        for x, y in loader:
            logits.append(network(x))
            labels.append(y)
            infos.append(network.equilibrium_layers[0].solve(network.stem(x)).info)
    return torch.cat(logits), torch.cat(labels), infos


@pytest.mark.spec("R7.1")
@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_agrees_with_a_plain_loop(data, stage):
    module = ClassifierModule(small_network(), label_smoothing=0.1)
    trainer = make_trainer()
    evaluate = trainer.validate if stage == "val" else trainer.test
    (metrics,) = evaluate(module, datamodule=data, verbose=False)
    loader = data.val_dataloader() if stage == "val" else data.test_dataloader()
    logits, labels, infos = predictions(module.network, loader)
    hits = logits.argsort(1, descending=True) == labels[:, None]
    expected = {
        "loss": nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": hits[:, 0].double().mean().item(),
        "accuracy_top5": hits[:, :5].any(1).double().mean().item(),
        "solver_steps": torch.cat([info.steps for info in infos]).double().mean().item(),
        "unconverged": 0,
        "residual_max": max(info.residual.max().item() for info in infos),
    }
    assert metrics == pytest.approx({f"{stage}_{name}": value for name, value in expected.items()}, rel=1e-4)


def test_the_confusion_matrix_of_a_test_is_counted(data):
    module = ClassifierModule(small_network())
    make_trainer().test(module, datamodule=data, verbose=False)
    logits, labels, _ = predictions(module.network, data.test_dataloader())
    expected = torch.zeros(10, 10, dtype=torch.long)
    for label, answer in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        expected[label, answer] += 1
    assert module.confusion.tolist() == expected.tolist()


@pytest.mark.parametrize("weights", ["balanced", [0.5, 2.0] * 5])
def test_class_weights_weigh_the_training_loss(weights):
    data = Digits(batch_size=128, train_limit=128)
    module = ClassifierModule(small_network(), class_weights=weights, learning_rate=1e-9)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    ((x, y),) = data.train_dataloader()
    shares = [sum(y == c).item() / 128 for c in range(10)]
    w = [1 / (10 * share) for share in shares] if weights == "balanced" else weights
    # The network has hardly moved, and its batch statistics are those of the one batch.
    losses = -module.network.train()(x).log_softmax(1)[torch.arange(128), y]
    each = torch.tensor([w[label] for label in y.tolist()])
    expected = (each * losses).sum() / each.sum()
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert not any("weights" in name for name in module.state_dict())


@pytest.mark.parametrize("weights", [[1.0], [-1.0] + [1.0] * 9, [float("nan")] * 10, [0.0] * 10])
def test_class_weights_that_are_none_are_refused(data, weights):
    with pytest.raises(ConfigError, match='`class_weights` to be "balanced" or 10 numbers'):
        make_trainer(max_epochs=1).fit(
            ClassifierModule(small_network(), class_weights=weights), datamodule=data
        )


def test_balanced_weights_need_counts(data):
    data.setup("fit")
    train, val = data.train_dataloader(), data.val_dataloader()

    class Own(LightningDataModule):
        class_names = tuple("0123456789")

        def train_dataloader(self):
            return train

        def val_dataloader(self):
            return val

    module = ClassifierModule(small_network(), class_weights="balanced")
    with pytest.raises(ConfigError, match="Own to have `class_counts`"):
        make_trainer(max_epochs=1).fit(module, datamodule=Own())


def test_unconverged_samples_are_counted(data):
    module = ClassifierModule(small_network(solver=Anderson(tol=1e-5, max_steps=1)))
    (metrics,) = make_trainer().test(module, datamodule=data, verbose=False)
    assert metrics["test_unconverged"] == 360
    assert metrics["test_residual_max"] > 1e-5


def test_training_logs_both_solves_and_learns():
    data = Digits(batch_size=32, train_limit=640)
    module = ClassifierModule(small_network(pool=4), optimizer="adamw", learning_rate=1e-2)
    trainer = make_trainer(max_epochs=5)
    trainer.fit(module, datamodule=data)
    metrics = trainer.callback_metrics
    assert metrics["train_adjoint_steps"] >= 1
    assert metrics["train_solver_steps"] >= 1
    assert metrics["train_adjoint_unconverged"] == metrics["train_unconverged"] == 0
    # Guessing gives log 10 and 0.1.
    assert metrics["train_loss"] < 1.5
    assert metrics["val_accuracy"] > 0.5


def test_logs_of_training_batches_do_not_pile_up(data):
    module = ClassifierModule(small_network())
    make_trainer(max_epochs=1).fit(module, datamodule=data)
    assert module.network.equilibrium_layers[0]._logs == []


def test_a_network_without_equilibrium_layers_trains(data):
    module = ClassifierModule(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    assert "train_loss" in trainer.callback_metrics
    assert not [name for name in trainer.callback_metrics if "solver" in name]


def test_biases_and_norms_have_no_weight_decay(data):
    network = small_network()
    module = ClassifierModule(network, optimizer="sgd", learning_rate=0.3, weight_decay=0.25)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    (optimizer,) = trainer.optimizers
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(network.parameters()))
    for name, parameter in network.named_parameters():
        is_exempt = name.endswith("bias") or "norms" in name or name.startswith("stem.1")
        assert decay[id(parameter)] == (0.0 if is_exempt else 0.25), name
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)


class _LearningRates(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_start(self, trainer, *args):
        self.values.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_schedule_spans_the_training_step_by_step(data):
    rates = _LearningRates()
    module = ClassifierModule(small_network(), learning_rate=0.5, schedule="linear")
    make_trainer(max_epochs=3, callbacks=[rates]).fit(module, datamodule=data)
    assert rates.values == pytest.approx([0.5 * (1 - step / 6) for step in range(6)])


def test_the_optimizer_follows_the_smoothed_loss(data):
    """One step of SGD equals a step by hand."""
    options = {"learning_rate": 0.1, "weight_decay": 0.0, "label_smoothing": 0.2, "schedule": "constant"}
    module = ClassifierModule(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **options)
    linear = module.network[1]
    before = linear.weight.detach().clone()
    data.batch_size = 128
    data.prepare_data()
    data.setup("fit")
    ((x, y),) = data.train_dataloader()
    weight = before.clone().requires_grad_()
    logits = x.flatten(1) @ weight.T + linear.bias.detach()
    smooth = nn.functional.one_hot(y, 10) * 0.8 + 0.02
    loss = -(smooth * logits.log_softmax(1)).sum(1).mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    make_trainer(max_steps=1).fit(module, datamodule=data)
    # Nesterov's first step is 1 + momentum gradients long.
    torch.testing.assert_close(linear.weight, before - 0.1 * 1.9 * gradient, rtol=1e-4, atol=1e-5)


BRANCHES = {"in_channels": 1, "channels": 4, "hidden": (4, 4)}


@pytest.mark.spec("R7.4", "R5.6")
def test_adversarial_training_takes_its_step_on_the_attacked_images(data):
    """With a linear network of two classes the attack, and so the step, is known."""
    data.prepare_data()
    data.setup("fit")
    data._train = data._train.subset((data._train.labels < 2).nonzero()[:, 0])
    data.batch_size = len(data._train)
    (x, y), network = next(iter(data.train_dataloader())), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    linear = network[1]
    with torch.no_grad():
        # Every pixel speaks for class 0 and against class 1; the others are out of the question.
        linear.weight.zero_()
        linear.weight[0], linear.weight[1] = 0.01, -0.01
        linear.bias.copy_(torch.tensor([0.0, 0.0] + [-1e4] * 8))
    epsilon, mean, std = 0.1, data.normalization.mean[0], data.normalization.std[0]
    shift = torch.where(y == 0, -epsilon, epsilon)[:, None, None, None]
    worst = ((x * std + mean + shift).clamp(0, 1) - mean) / std
    before = linear.weight.detach().clone()
    weight = before.clone().requires_grad_()
    loss = nn.functional.cross_entropy(worst.flatten(1) @ weight.T + linear.bias.detach(), y)
    (gradient,) = torch.autograd.grad(loss, weight)
    adversary = PGD(steps=10, epsilon=epsilon, step_size=0.05)
    options = {"learning_rate": 0.1, "weight_decay": 0.0, "schedule": "constant"}
    make_trainer(max_steps=1).fit(ClassifierModule(network, adversary=adversary, **options), datamodule=data)
    torch.testing.assert_close(linear.weight, before - 0.1 * 1.9 * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.spec("R5.6")
def test_adversarial_training_of_branches_counts_its_own_solves_alone(data):
    torch.manual_seed(0)
    network = branch_classifier(Coupled, **BRANCHES, perturbation=0.1)
    module = ClassifierModule(network, optimizer="adamw", learning_rate=1e-2, adversary=PGD(steps=2))
    samples = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            samples.append((module._solves.forward.samples, len(batch[0])))

    make_trainer(max_epochs=1, callbacks=[Count()]).fit(module, datamodule=data)
    assert samples
    assert all(solved == size for solved, size in samples)


@pytest.mark.spec("R5.6")
def test_the_penalty_lowers_diversity_and_raises_heritage():
    """Trained on the penalty almost alone, other channels lose their share to corresponding ones."""
    data = Digits(batch_size=64, train_limit=640)
    data.setup("test")
    shares = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        network = branch_classifier(Unit, **BRANCHES)
        penalty = HeritageDiversity(weight=0.5)
        module = ClassifierModule(
            network, optimizer="adamw", learning_rate=1e-2, penalty=penalty, penalty_weight=weight
        )
        make_trainer(max_epochs=2).fit(module, datamodule=data)
        x, _ = next(iter(data.test_dataloader()))
        with torch.no_grad():
            z = network.eval().features(x)
            n = torch.stack(penalty.at(z).correlations(z), 1)
        diagonal = n.diagonal(dim1=2, dim2=3)
        shares[weight] = (diagonal.sum() / n.abs().sum()).item()
    assert shares[1.0] > shares[0.0] + 0.1


class Pyramid(nn.Module):
    """A body of one's own: the features and their half, without any equilibrium."""

    def forward(self, x):
        return x, nn.functional.avg_pool2d(x, 2)


def test_the_penalty_is_that_of_whatever_the_body_gives(data):
    torch.manual_seed(0)
    network = ImageClassifier(ConvStem(1, 4), Pyramid(), Head(4, 10, branches=2))
    penalty = HeritageDiversity(weight=0.5)
    module = ClassifierModule(network, penalty=penalty, penalty_weight=0.25)
    x = torch.randn(6, 1, 8, 8)
    logits, value = module._answer(x)
    z = network.features(x)
    torch.testing.assert_close(value, 0.25 * penalty.at(z).value(z).mean())
    torch.testing.assert_close(logits, network(x))


def test_the_penalty_needs_branches(data):
    networks = (small_network(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    for network, got in zip(networks, ("a body that gives one", "Sequential"), strict=True):
        module = ClassifierModule(network, penalty=HeritageDiversity())
        with pytest.raises(ConfigError, match=f"an ImageClassifier for `penalty`.*{got}"):
            make_trainer(max_epochs=1).fit(module, datamodule=data)


def test_a_training_that_diverges_is_stopped(data):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network[1].weight.data.fill_(float("inf"))
    with pytest.raises(OpteqError, match=r"loss became nan in step 0; lower --model\.learning_rate"):
        make_trainer(max_epochs=1).fit(ClassifierModule(network), datamodule=data)


def test_weights_of_another_model_are_refused_before_any_is_loaded():
    small, large = ClassifierModule(small_network()), ClassifierModule(deep_network())
    before = {name: value.clone() for name, value in large.state_dict().items()}
    with pytest.raises(ConfigError, match="from another model"):
        large.on_load_checkpoint({"state_dict": small.state_dict()})
    assert all(torch.equal(value, before[name]) for name, value in large.state_dict().items())
    wide = ClassifierModule(small_network(channels=8))
    with pytest.raises(ConfigError, match=r"\(8, 32, 3, 3\)|\(8,|\(4,"):
        wide.on_load_checkpoint({"state_dict": small.state_dict()})
    small.on_load_checkpoint({"state_dict": ClassifierModule(small_network()).state_dict()})


def test_endless_training_needs_an_end(data):
    with pytest.raises(ConfigError, match="max_epochs"):
        make_trainer(max_epochs=-1).fit(ClassifierModule(small_network()), datamodule=data)


@pytest.mark.spec("R7.1")
def test_the_meter_counts_images_and_survives_a_checkpoint(data):
    meter = TrainingMeter()
    make_trainer(max_epochs=3, callbacks=[meter]).fit(ClassifierModule(small_network()), datamodule=data)
    assert meter.images == 3 * 128
    assert meter.seconds > 0
    resumed = TrainingMeter()
    resumed.load_state_dict(meter.state_dict())
    make_trainer(max_epochs=1, callbacks=[resumed]).fit(ClassifierModule(small_network()), datamodule=data)
    assert resumed.images == 4 * 128
    assert resumed.seconds > meter.seconds
