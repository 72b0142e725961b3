"""A training that was cut short and resumed is the training that would have been."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opteq import native
from opteq.cli import main
from opteq.data.digits import Digits
from opteq.training import command
from opteq.training.checkpoints import LastCheckpoint, read_checkpoint

EMA = ("--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging", "--trainer.callbacks.decay=0.5")
SWA = (
    "--trainer.callbacks+=lightning.pytorch.callbacks.StochasticWeightAveraging",
    "--trainer.callbacks.swa_lrs=0.01",
    "--trainer.callbacks.swa_epoch_start=2",
    "--trainer.callbacks.device=null",
)
CASES = {
    "in workers": ("--data.augmentation", "crop", "--data.num_workers", "2"),
    "in workers that persist": (
        "--data=tests.cli.test_resume.Persistent",
        "--data.train_limit=128",
        "--data.augmentation=crop",
        "--data.num_workers=2",
    ),
    "averaged": ("--data.augmentation", "crop-flip", *EMA),
    "averaged from its second epoch on": SWA,
    "not validated": (
        "--trainer.limit_val_batches=0",
        "--trainer.callbacks+=opteq.training.tolerance.FollowingTolerance",
    ),
}


class Persistent(Digits):
    """Loaders with workers that outlive an epoch, and with random numbers of their own."""

    def _loader(self, images, augmented=False, **options):
        generator = torch.Generator().manual_seed(5)
        return super()._loader(images, augmented, persistent_workers=True, generator=generator, **options)


class Cut(BaseException):
    """The end of a process, as far as it can be had within one."""


@pytest.fixture
def fit(tiny, opteq):
    """Trains three epochs in `runs/<name>`."""

    def run(name, *options):
        return opteq("fit", "--config", tiny, "--run", name, "--trainer.max_epochs", 3, *options)

    return run


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of a training that nothing interrupted."""
    runs = tmp_path_factory.mktemp("runs")
    options = ("--runs_dir", str(runs), "--run", "whole", "--report", "false")
    assert main(["fit", "--config", tiny, "--trainer.max_epochs", "3", *options]) == 0
    return runs / "whole"


@pytest.fixture
def cut(monkeypatch):
    """Ends what runs when the checkpoint of an epoch was written, or was about to be."""
    save = LastCheckpoint.on_train_epoch_end

    def at(epoch, saved=True):
        def end(self, trainer, module):
            if saved or trainer.current_epoch < epoch:
                save(self, trainer, module)
            if trainer.current_epoch == epoch:
                raise Cut

        monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", end)

    return at


def curves(folder):
    # Files begun in the same second are read in any order, and an earlier one would purge a later one.
    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    # What is logged twice for a step, as the epoch is, is one point.
    return {tag: {(e.step, e.value) for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def check_same(one, other):
    assert (one / "metrics.csv").read_text() == (other / "metrics.csv").read_text()
    assert curves(one) == curves(other)
    for name in sorted(path.name for path in (one / "checkpoints").iterdir()):
        ours, theirs = (read_checkpoint(folder / "checkpoints" / name) for folder in (one, other))
        assert ours["epoch"] == theirs["epoch"]
        for key, weight in ours["state_dict"].items():
            assert torch.equal(weight, theirs["state_dict"][key]), (name, key)
    exported = load_file(other / "model.safetensors")
    for key, weight in load_file(one / "model.safetensors").items():
        assert torch.equal(weight, exported[key]), key
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    measured = {"seconds_train", "images_per_second", "peak_memory_mb"}
    ours, theirs = ({k: v for k, v in s.items() if k not in measured} for s in summaries)
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_is_the_same(case, fit, cut, tmp_path):
    assert fit("whole", *CASES[case]).status == 0
    cut(0)
    with pytest.raises(Cut):
        fit("parts", *CASES[case])
    cut(1, saved=False)
    with pytest.raises(Cut):
        fit("parts", *CASES[case], "--ckpt_path", "last")
    cut(9)
    result = fit("parts", *CASES[case], "--ckpt_path", "last")
    assert result.status == 0, result.err
    check_same(tmp_path / "runs" / "whole", tmp_path / "runs" / "parts")


def test_a_training_without_a_checkpoint_is_resumed_from_its_start(whole, fit, cut, tmp_path):
    cut(0, saved=False)
    with pytest.raises(Cut):
        fit("parts")
    cut(9)
    assert fit("parts", "--ckpt_path", "last").status == 0
    check_same(whole, tmp_path / "runs" / "parts")


def test_a_training_that_only_its_results_are_missing_of_gets_them(whole, fit, monkeypatch, tmp_path):
    def end(*_):
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(command, "save_network", end)
        with pytest.raises(Cut):
            fit("parts")
    result = fit("parts", "--ckpt_path", "last")
    assert result.status == 0, result.err
    assert "Nothing was left to train; raise --trainer.max_epochs to go on. Test accuracy" in result.out
    check_same(whole, tmp_path / "runs" / "parts")


def test_another_seed_does_not_change_a_training_that_is_resumed(whole, fit, cut, tmp_path):
    cut(0)
    with pytest.raises(Cut):
        fit("parts")
    cut(9)
    assert fit("parts", "--ckpt_path", "last", "--seed_everything", 77).status == 0
    check_same(whole, tmp_path / "runs" / "parts")


def test_what_is_not_validated_is_tested_at_its_end(fit, opteq, tmp_path):
    result = fit("blind", "--trainer.limit_val_batches", 0)
    assert result.status == 0, result.err
    assert "Test accuracy" in result.out
    assert "of the last checkpoint" in result.out
    folder = tmp_path / "runs" / "blind"
    last = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, last[f"network.{name}"])
    assert opteq("test", folder).status == 0


def test_one_model_is_tested_saved_and_shown(fit, opteq, tmp_path, monkeypatch):
    shown = []

    def write_report(folder, network, data):
        shown.append({name: weight.clone() for name, weight in network.state_dict().items()})
        return folder / "report.html"

    monkeypatch.setattr("opteq.evaluation.report.write_report", write_report)
    result = fit("run", *EMA)
    assert result.status == 0, result.err
    folder = tmp_path / "runs" / "run"
    best = read_checkpoint(folder / "checkpoints" / "best.ckpt")
    exported = load_file(folder / "model.safetensors")
    for name, weight in exported.items():
        assert torch.equal(weight, best["state_dict"][f"network.{name}"]), name
        assert torch.equal(weight, shown[0][name]), name
    raw = best["current_model_state"]
    assert any(not torch.equal(weight, raw[f"network.{name}"]) for name, weight in exported.items())
    # Twice the same numbers, from what the command `test` loads and from what was trained.
    summary = json.loads((folder / "summary.json").read_text())
    lines = opteq("test", folder, "--trust", "true").out.splitlines()
    for name, printed in (("test_accuracy", "test_accuracy"), ("residual_max", "test_residual_max")):
        (score,) = (line.split()[1] for line in lines if line.startswith(f"{printed} "))
        assert score == f"{summary[name]:.4g}"


def test_the_stochastic_average_is_that_of_the_epochs(fit, cut, tmp_path, monkeypatch):
    """By hand, from the weights that every epoch starts with from the first one on that is averaged."""
    seen = []
    fit_epoch = LastCheckpoint.on_train_epoch_end

    def note(self, trainer, module):
        fit_epoch(self, trainer, module)
        seen.append({name: p.detach().double().clone() for name, p in module.named_parameters()})

    monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", note)
    assert fit("run", *SWA).status == 0
    weights = load_file(tmp_path / "runs" / "run" / "model.safetensors")
    # It takes the weights up as epochs start, so that what the last epoch made of them does not count.
    for name, first in seen[0].items():
        mean = (first + seen[1][name]) / 2
        torch.testing.assert_close(
            weights[name.removeprefix("network.")].double(), mean, rtol=1e-5, atol=1e-6
        )


@pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")
def test_a_training_that_goes_on_without_compiled_code_says_so(fit, cut, monkeypatch, caplog):
    def said():
        return [text for text in caplog.messages if "compiled code" in text]

    cut(0)
    with pytest.raises(Cut):
        fit("parts")
    assert said() == []
    monkeypatch.setattr(native, "enabled", False)
    cut(1)
    with pytest.raises(Cut):
        fit("parts", "--ckpt_path", "last")
    (sentence,) = said()
    assert sentence.startswith("The training goes on without compiled code, unlike before, and its numbers")
    assert "opteq.native.enabled = False" in sentence
    cut(9)
    assert fit("parts", "--ckpt_path", "last").status == 0
    assert said() == [sentence]


def test_epochs_draw_other_numbers(fit, tmp_path, monkeypatch):
    labels = []

    def note(self, batch, batch_idx):
        if batch_idx == 0:
            labels.append(batch[1].tolist())

    monkeypatch.setattr("opteq.training.module.ClassifierModule.on_train_batch_start", note)
    assert fit("run").status == 0
    assert len({tuple(batch) for batch in labels}) == 3
