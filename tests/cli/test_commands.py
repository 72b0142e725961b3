import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_info
from PIL import Image
from sklearn.datasets import load_digits

from opteq.cli import main
from opteq.configs import presets
from opteq.evaluation.suites.names import SUITES
from opteq.models.loading import load, pretrained
from opteq.solvers.picard import Picard
from opteq.training.checkpoints import AtomicCheckpointIO, read_checkpoint
from tests.networks import preset_network


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """The folder of a finished run."""
    runs = tmp_path_factory.mktemp("runs")
    assert main(["fit", "--config", tiny, "--run", "first", "--runs_dir", str(runs)]) == 0
    return runs / "first"


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class TestFit:
    def test_leaves_a_complete_run(self, finished):
        names = {path.name for path in finished.iterdir()}
        assert names >= {
            "config.yaml",
            "versions.json",
            "metrics.csv",
            "summary.json",
            "checkpoints",
            "tensorboard",
            "model.safetensors",
            "model.json",
            "report.html",
        }
        assert {path.name for path in (finished / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
        assert list((finished / "tensorboard").glob("events*"))
        assert not list(finished.rglob("*.part"))

    @pytest.mark.spec("R7.1")
    def test_the_summary_describes_the_network_that_is_loaded(self, finished):
        summary = json.loads((finished / "summary.json").read_text())
        assert list(summary) == [
            "dataset",
            "model",
            "parameters",
            "test_accuracy",
            "solver_steps_mean",
            "residual_max",
            "unconverged",
            "seconds_train",
            "images_per_second",
            "peak_memory_mb",
            "test_classes",
        ]
        found = sum(scores["recall"] * scores["counts"] for scores in summary["test_classes"].values())
        assert found == pytest.approx(360 * summary["test_accuracy"])
        network = load(finished)
        assert (summary["dataset"], summary["model"]) == ("Digits", "OptEqUnit")
        assert summary["parameters"] == sum(p.numel() for p in network.parameters())
        assert summary["unconverged"] == 0
        assert summary["images_per_second"] == pytest.approx(256 / summary["seconds_train"], rel=0.1)
        assert 50 < summary["peak_memory_mb"] < 10_000

    def test_the_exported_network_reaches_the_accuracy_of_the_summary(self, finished):
        from opteq.data.digits import Digits

        data = Digits()
        data.setup("test")
        network = load(finished)
        with torch.no_grad():
            hits = torch.cat([network(x).argmax(1) == y for x, y in data.test_dataloader()])
        summary = json.loads((finished / "summary.json").read_text())
        assert summary["test_accuracy"] == pytest.approx(hits.double().mean().item(), abs=1e-6)

    def test_the_last_checkpoint_is_that_of_the_last_epoch(self, finished):
        assert read_checkpoint(finished / "checkpoints" / "last.ckpt")["epoch"] == 1

    def test_the_best_checkpoint_is_exported(self, finished):
        best = read_checkpoint(finished / "checkpoints" / "best.ckpt")["state_dict"]
        for name, weight in load(finished).state_dict().items():
            assert torch.equal(weight, best[f"network.{name}"])
        rows = rows_of(finished / "metrics.csv")
        accuracies = [float(row["val_accuracy"]) for row in rows]
        epoch = read_checkpoint(finished / "checkpoints" / "best.ckpt")["epoch"]
        assert accuracies[epoch] == max(accuracies)

    def test_one_row_of_metrics_per_epoch(self, finished):
        rows = rows_of(finished / "metrics.csv")
        assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1"), ("1", "3")]
        assert all(all(row.values()) for row in rows)

    def test_the_configuration_is_resolved_and_works_again(self, finished, opteq):
        config = yaml.safe_load((finished / "config.yaml").read_text())
        assert list(config) == ["seed_everything", "trainer", "model", "data"]
        parts = config["model"]["network"]["init_args"]
        assert parts["stem"]["init_args"]["in_channels"] == 1
        assert parts["body"]["init_args"]["channels"] == 4
        assert (parts["head"]["init_args"]["channels"], parts["head"]["init_args"]["classes"]) == (4, 10)
        status, _, err = opteq("fit", "--config", finished / "config.yaml")
        assert status == 0, err
        again = load(f"runs/{finished.name}").state_dict()
        for name, weight in load(finished).state_dict().items():
            assert torch.equal(weight, again[name]), "the same seed gives the same weights"

    def test_a_run_is_never_overwritten(self, tiny, opteq, tmp_path):
        for _ in range(2):
            assert opteq("fit", "--config", tiny, "--trainer.max_epochs", 1).status == 0
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]

    def test_a_quick_check_writes_nothing(self, tiny, opteq, tmp_path):
        assert opteq("fit", "--config", tiny, "--trainer.fast_dev_run", "true").status == 0
        assert list(tmp_path.iterdir()) == []

    def test_options_reach_network_solver_data_and_trainer(self, tiny, opteq, tmp_path):
        result = opteq(
            "fit", f"--config={tiny}", "--run", "wide", "--model.network.stem.channels", 6,
            "--model.network.body.solver", "Picard", "--model.network.body.solver.tol", "1e-2",
            "--data.train_limit", 64, "--trainer.max_epochs", 1, "--trainer.precision", "bf16-mixed",
        )  # fmt: skip
        assert result.status == 0, result.err
        network = load(tmp_path / "runs" / "wide")
        assert network.head[-1].in_features == 6
        assert network.equilibrium_layers[0].solver == Picard(tol=1e-2)
        config = yaml.safe_load((tmp_path / "runs" / "wide" / "config.yaml").read_text())
        assert config["trainer"]["precision"] == "bf16-mixed"
        assert config["data"]["init_args"]["train_limit"] == 64

    def test_the_table_can_be_the_only_logger(self, tiny, opteq, tmp_path):
        result = opteq("fit", "--config", tiny, "--trainer.logger", "csv", "--trainer.max_epochs", 1)
        assert result.status == 0, result.err
        names = {path.name for path in (tmp_path / "runs" / "tiny").iterdir()}
        assert "metrics.csv" in names
        assert "tensorboard" not in names

    def test_loggers_can_be_switched_off(self, tiny, opteq, tmp_path):
        assert opteq("fit", "--config", tiny, "--trainer.logger", "false").status == 0
        names = {path.name for path in (tmp_path / "runs" / "tiny").iterdir()}
        assert "summary.json" in names
        assert not names & {"metrics.csv", "tensorboard"}

    def test_says_where_the_results_are_and_nothing_of_other_products(self, tiny, opteq, caplog):
        _, out, err = opteq("fit", "--config", tiny, "--trainer.max_epochs", 1)
        assert "look at runs/tiny/report.html" in out
        assert [record.getMessage() for record in caplog.records][-2:] == [
            "Testing the best checkpoint …",
            "Writing the report: predictions, certificates, what equilibria are worth …",
        ]
        for noise in ("💡", "litlogger", "GPU available", "does not have many workers"):
            assert noise not in out + err + caplog.text


class TestResume:
    def test_goes_on_and_says_from_where(self, finished, tiny, opteq, tmp_path, caplog):
        shutil.copytree(finished, tmp_path / "runs" / "tiny")
        before = rows_of(finished / "metrics.csv")
        status, _, err = opteq("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 3)
        assert status == 0, err
        assert [text for text in caplog.messages if "last.ckpt" in text] == [
            "Resuming runs/tiny after 2 epochs from runs/tiny/checkpoints/last.ckpt."
        ]
        # Cosine over 3 epochs of 2 steps, after 4 of the 6.
        assert "The learning rate goes on at 0.0025, where the schedule cosine is after 4 of 6" in caplog.text
        rows = rows_of(tmp_path / "runs" / "tiny" / "metrics.csv")
        assert rows[:2] == before
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
        summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
        # Two epochs before, one now.
        assert summary["images_per_second"] * summary["seconds_train"] == pytest.approx(3 * 128, rel=0.1)

    def test_a_run_without_a_checkpoint_begins_anew_and_says_so(
        self, finished, tiny, opteq, tmp_path, caplog
    ):
        folder = tmp_path / "runs" / "tiny"
        folder.mkdir(parents=True)
        shutil.copy(finished / "config.yaml", folder)
        status, _, err = opteq("fit", "--config", tiny, "--run", "tiny", "--ckpt_path", "last")
        assert status == 0, err
        assert "Beginning runs/tiny anew: it ended before its first checkpoint." in caplog.text
        assert len(rows_of(folder / "metrics.csv")) == 2

    def test_resumed_equals_uninterrupted_weights_and_optimizer(self, finished, tiny, opteq, tmp_path):
        """A training of no further epochs ends where it was."""
        shutil.copytree(finished, tmp_path / "runs" / "tiny")
        assert opteq("fit", "--config", tiny, "--ckpt_path", "last").status == 0
        now, before = load(tmp_path / "runs" / "tiny").state_dict(), load(finished).state_dict()
        assert all(torch.equal(now[name], before[name]) for name in before)

    def test_the_learning_rate_follows_the_new_length(self, finished, tiny, opteq, tmp_path):
        shutil.copytree(finished, tmp_path / "runs" / "tiny")
        opteq("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 4)
        rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "runs" / "tiny" / "metrics.csv")]
        # Cosine over 4 epochs of 2 steps: after 6 and 8 of 8 steps.
        assert rates[2:] == pytest.approx([1e-2 * (1 + np.cos(np.pi * 6 / 8)) / 2, 0], abs=1e-8)

    def test_nothing_left_to_train_in_a_new_run(self, finished, tiny, refuses):
        sentence = refuses("fit", "--config", tiny, "--ckpt_path", finished / "checkpoints" / "last.ckpt")
        assert "raise it to go on" in sentence

    def test_a_moved_run_keeps_its_best_checkpoint(self, finished, tiny, opteq, tmp_path):
        folder = tmp_path / "runs" / "tiny"
        shutil.copytree(finished, folder)
        last = folder / "checkpoints" / "last.ckpt"
        checkpoint = read_checkpoint(last)
        # A score that no epoch will reach.
        (key,) = (key for key in checkpoint["callbacks"] if key.startswith("BestCheckpoint"))
        checkpoint["callbacks"][key]["best_model_score"] = torch.tensor(2.0)
        checkpoint["callbacks"][key]["kth_value"] = torch.tensor(2.0)
        AtomicCheckpointIO().save_checkpoint(checkpoint, last)
        best = (folder / "checkpoints" / "best.ckpt").read_bytes()
        opteq("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 3)
        assert read_checkpoint(last)["epoch"] == 2
        assert (folder / "checkpoints" / "best.ckpt").read_bytes() == best

    def test_a_checkpoint_starts_a_new_run(self, finished, tiny, opteq, tmp_path, caplog):
        last = finished / "checkpoints" / "last.ckpt"
        status, _, err = opteq("fit", "--config", tiny, "--ckpt_path", last, "--trainer.max_epochs", 3)
        assert status == 0, err
        assert [row["epoch"] for row in rows_of(tmp_path / "runs" / "tiny" / "metrics.csv")] == ["2"]
        told = [text for text in caplog.messages if "last.ckpt" in text]
        assert told == [f"Going on from {last} in runs/tiny."]

    @pytest.mark.parametrize("options", [("--ckpt_path", "last", "--run", "tiny"), ("--ckpt_path", "{last}")])
    def test_the_data_of_an_earlier_training_are_pointed_to(self, finished, refuses, tmp_path, options):
        shutil.copytree(finished, tmp_path / "runs" / "tiny")
        options = [option.format(last="runs/tiny/checkpoints/last.ckpt") for option in options]
        sentence = refuses("fit", "--config", "cifar10-small", *options)
        assert sentence.endswith("To go on with the data of runs/tiny, give --config runs/tiny/config.yaml.")

    def test_a_new_run_from_a_checkpoint_has_the_rate_asked_for(self, finished, tiny, opteq, tmp_path):
        last = finished / "checkpoints" / "last.ckpt"
        options = ["--trainer.max_epochs", 4, "--model.schedule", "constant", "--model.learning_rate", 0.003]
        assert opteq("fit", "--config", tiny, "--ckpt_path", last, *options).status == 0
        rows = rows_of(tmp_path / "runs" / "tiny" / "metrics.csv")
        assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.003, 0.003])

    def test_a_new_run_from_a_checkpoint_may_have_another_optimizer(
        self, finished, tiny, opteq, tmp_path, caplog
    ):
        last = finished / "checkpoints" / "last.ckpt"
        options = ["--trainer.max_epochs", 3, "--model.optimizer", "sgd"]
        status, _, err = opteq("fit", "--config", tiny, "--ckpt_path", last, *options)
        assert status == 0, err
        assert any("another kind" in text for text in caplog.messages)

    def test_options_of_the_model_must_be_those_of_the_run(self, finished, tiny, refuses, tmp_path):
        shutil.copytree(finished, tmp_path / "runs" / "tiny")
        sentence = refuses("fit", "--config", tiny, "--ckpt_path", "last", "--model.learning_rate", "0.5")
        assert "model.learning_rate was 0.01 and is now 0.5" in sentence


class TestEvaluation:
    def test_test_reports_the_accuracy_of_the_run(self, finished, opteq):
        status, out, err = opteq("test", finished)
        assert status == 0, err
        summary = json.loads((finished / "summary.json").read_text())
        assert re.search(rf"^test_accuracy +{summary['test_accuracy']:.4g}$", out, re.MULTILINE)
        assert re.search(r"^test_unconverged +0$", out, re.MULTILINE)
        assert "DataLoader" not in out
        assert err == ""

    @pytest.mark.parametrize(("command", "split"), [("test", "test"), ("validate", "val")])
    def test_no_batch_to_look_at_is_a_sentence(self, finished, refuses, command, split):
        sentence = refuses(command, finished, f"--trainer.limit_{split}_batches", 0)
        assert sentence == f"No images were looked at; raise --trainer.limit_{split}_batches."

    def test_validate_reports_the_best_validation_accuracy(self, finished, opteq):
        status, out, err = opteq("validate", finished)
        assert status == 0, err
        best = max(row["val_accuracy"] for row in rows_of(finished / "metrics.csv"))
        assert re.search(rf"^val_accuracy +{float(best):.4g}$", out, re.MULTILINE)
        assert err == ""

    def test_with_configuration_and_checkpoint(self, finished, tiny, opteq):
        result = opteq("test", "--config", tiny, "--ckpt_path", finished / "checkpoints" / "last.ckpt")
        assert result.status == 0
        assert "test_accuracy" in result.out

    def test_the_checkpoints_of_the_run_by_their_names(self, finished, opteq, tmp_path):
        run = shutil.copytree(finished, tmp_path / "run")
        for command in ("test", "validate"):
            outs = [
                opteq(command, run, "--ckpt_path", which).out
                for which in ("last", run / "checkpoints" / "last.ckpt")
            ]
            assert "accuracy" in outs[0]
            assert outs[0] == outs[1]
        (run / "checkpoints" / "last.ckpt").unlink()
        assert opteq("test", run, "--ckpt_path", "best").status == 0
        result = opteq("test", run, "--ckpt_path", "last")
        assert result.status == 2
        assert f"opteq: There is no checkpoint {run}/checkpoints/last.ckpt." in result.err

    @pytest.mark.spec("R7.9")
    def test_what_the_equilibrium_is_worth_lies_in_the_run(self, finished, opteq, tmp_path):
        run = shutil.copytree(finished, tmp_path / "run")
        status, out, err = opteq("test", run, "--suite", "equilibrium")
        assert status == 0, err
        stored = json.loads((run / "evaluation" / "equilibrium.json").read_text())["scores"]
        summary = json.loads((run / "summary.json").read_text())
        assert stored["full_accuracy"] == pytest.approx(summary["test_accuracy"], abs=1e-6)
        row = next(line.split() for line in out.splitlines() if line.strip().startswith("accuracy "))
        assert row[1:] == [f"{a:.2%}" for a in (*stored["accuracy"], stored["full_accuracy"])]
        assert f"into {run / 'evaluation'}." in out
        assert (run / "evaluation" / "equilibrium-spectra.png").is_file()
        # The test itself is a command of its own.
        assert "test_accuracy" not in out

    def test_a_suite_goes_on_until_the_checkpoint_changes(self, finished, opteq, tmp_path):
        run = shutil.copytree(finished, tmp_path / "run")
        command = ("test", run, "--suite", "attacks,saliency", "--suite_images", 8, "--epsilons", "1/255,0.1")
        path = run / "evaluation" / "attacks.json"
        assert opteq(*command, "--restarts", 1).status == 0
        stored = json.loads(path.read_text())
        assert stored["epsilons"] == [1 / 255, 0.1]
        assert (stored["images"], stored["restarts"]) == (8, 1)
        assert stored["scores"]["steps"] == [1, 2, 3, 5, 10, 20]
        # As if it had been interrupted, with a part that no attack would leave.
        del stored["tables"], stored["scores"]
        stored["parts"] = {"clean": 0.25}
        path.write_text(json.dumps(stored))
        status, out, err = opteq(*command, "--restarts", 1)
        assert status == 0, err
        said = "Accuracy under attack on 8 images (352 left out by --suite_images); 25.00% without"
        assert said in out
        assert "Grad-CAM of the predicted class" in out
        (run / "checkpoints" / "best.ckpt").unlink()  # then it is judged by the last
        torch.manual_seed(0)
        last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        last["another"] = 1
        torch.save(last, run / "checkpoints" / "last.ckpt")
        status, out, err = opteq(*command, "--restarts", 1)
        assert status == 0, err
        assert said not in out

    def test_an_interrupted_suite_says_how_to_go_on(self, finished, opteq, tmp_path, monkeypatch):
        def interrupt(*arguments):
            raise KeyboardInterrupt

        run = shutil.copytree(finished, tmp_path / "run")
        monkeypatch.setattr("opteq.evaluation.robustness.attacked_accuracy", interrupt)
        status, _, err = opteq("test", run, "--suite", "attacks", "--suite_images", 8)
        assert status == 130
        assert "opteq: Interrupted; the same command goes on." in err

    def test_what_belongs_to_no_run_lies_beside_its_checkpoint(self, finished, tiny, opteq, tmp_path):
        checkpoint = shutil.copy(finished / "checkpoints" / "last.ckpt", tmp_path / "mine.ckpt")
        options = ("--ckpt_path", checkpoint, "--suite", "saliency")
        assert opteq("test", "--config", tiny, *options).status == 0
        assert (tmp_path / "evaluation" / "saliency.json").is_file()

    def test_an_explicit_network_has_no_equilibrium_to_show(self, tiny, opteq):
        explicit = ("--model.network.body", "torch.nn.Identity")
        status, _, err = opteq("fit", "--config", tiny, *explicit, "--trainer.max_epochs", 1)
        assert status == 0, err
        status, _, err = opteq("test", "runs/tiny", "--suite", "equilibrium")
        assert status == 2
        assert "opteq: This network has no equilibrium layer: there is no equilibrium to study." in err
        assert not Path("runs/tiny/evaluation").exists()

    def test_evaluation_leaves_the_run_as_it_was(self, finished, opteq, tmp_path):
        before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
        opteq("test", finished)
        opteq("validate", finished)
        assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
        assert list(tmp_path.iterdir()) == []


class TestPredict:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "images"
        folder.mkdir()
        for i, image in enumerate(load_digits().images[:5]):
            pixels = (image * 255 / 16).round().astype(np.uint8)
            Image.fromarray(pixels).convert("RGB").save(folder / f"{i}.png")
        return folder

    def test_run_and_folder(self, finished, folder, opteq, tmp_path):
        status, out, err = opteq("predict", finished, folder)
        assert status == 0, err
        assert f"Wrote 5 predictions to {finished}/predictions.csv" in out
        rows = rows_of(finished / "predictions.csv")
        assert [row["path"] for row in rows] == [str(folder / f"{i}.png") for i in range(5)]
        assert {row["converged"] for row in rows} == {"True"}

    def test_configuration_and_checkpoint_give_the_same(self, finished, folder, tiny, opteq, tmp_path):
        opteq("predict", finished, folder, "--output", "a.csv")
        checkpoint = finished / "checkpoints" / "best.ckpt"
        arguments = ("--ckpt_path", checkpoint, "--images", folder, "--output", "b.csv")
        status, _, err = opteq("predict", "--config", tiny, *arguments)
        assert status == 0, err
        assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


class TestBranches:
    @pytest.mark.spec("R5.6")
    def test_a_coupled_network_trains_under_attack_and_is_loaded(self, opteq, tiny, tmp_path):
        config = yaml.safe_load(Path(tiny).read_text())
        config["model"]["network"] = {
            "class_path": "opteq.models.classifier.ImageClassifier",
            "init_args": {
                "stem": {"class_path": "opteq.models.stems.ConvStem", "init_args": {"channels": 4}},
                "body": {
                    "class_path": "opteq.models.bodies.Coupled",
                    "init_args": {
                        "hidden": [4, 4],
                        "reductions": [1, 2],
                        "coupling": {
                            "class_path": "opteq.objectives.coupling.HeritageDiversity",
                            "init_args": {"weight": 0.02, "heritage": False},
                        },
                    },
                },
                "head": {"class_path": "opteq.models.heads.Head", "init_args": {"branches": 2}},
            },
        }
        config["model"]["adversary"] = {
            "class_path": "opteq.evaluation.attacks.PGD",
            "init_args": {"steps": 1},
        }
        config["model"]["penalty"] = {"class_path": "opteq.objectives.coupling.HeritageDiversity"}
        (tmp_path / "branches.yaml").write_text(yaml.safe_dump(config))
        status, _, err = opteq("fit", "--config", "branches.yaml", "--run", "branches")
        assert status == 0, err
        network = load(tmp_path / "runs" / "branches")
        coupling = network.equilibrium_layers[0].map.coupling
        assert (coupling.weight, coupling.heritage) == (0.02, False)
        assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)

    def test_an_unknown_option_of_the_coupling_is_named(self, refuses):
        # Of data that are there: missing ones are told of first.
        options = ("--data", "opteq.data.digits.Digits", "--model.network.body.coupling.tua", "1")
        message = refuses("fit", "--config", "cifar10-mopteq", *options)
        assert "tua" in message


def test_no_advice_is_given_on_the_images_of_a_smoke_test(opteq, monkeypatch, caplog):
    def reproduce(*_):
        rank_zero_info("More validation images choose better.")

    monkeypatch.setattr("opteq.experiments.reproduce.reproduce", reproduce)
    monkeypatch.setattr("opteq.experiments.output.write_results", lambda *_: "table.md")
    for scale, said in (("smoke", 0), ("small", 1)):
        caplog.clear()
        assert opteq("reproduce", "opteq-table5", "--scale", scale, "--output", "out").status == 0
        assert len(caplog.messages) == said


class TestPresets:
    def test_lists_every_file_with_parameters_and_result(self, opteq):
        status, out, _ = opteq("presets")
        assert status == 0
        for preset in presets():
            # The columns line up, however long a name is.
            assert re.search(rf"^{preset.name}  +{re.escape(preset.description)}$", out, re.MULTILINE)
            assert f"{preset.parameters:,} parameters; {preset.expected}" in out

    def test_those_that_come_with_weights_are_marked(self, opteq):
        _, out, _ = opteq("presets")
        marked = re.findall(r"^(\S+) .*\n .*; comes trained$", out, re.MULTILINE)
        assert sorted(marked) == pretrained()

    def test_what_was_measured_comes_first(self, opteq):
        _, out, _ = opteq("presets")
        results = re.findall(r"^ +[\d,]+ parameters; (not measured)?", out, re.MULTILINE)
        assert len(results) == len(presets())
        assert results == sorted(results)
        assert set(results) == {"", "not measured"}

    @pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
    def test_the_number_of_parameters_is_true(self, preset):
        network = preset_network(preset.name)
        assert sum(p.numel() for p in network.parameters()) == preset.parameters

    @pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
    def test_every_preset_is_accepted(self, preset, opteq):
        with pytest.raises(SystemExit) as end:
            opteq("fit", "--config", preset.name, "--print_config")
        assert end.value.code == 0


class TestHelp:
    def test_the_examples_of_options_are_accepted(self, opteq, capsys):
        status, out, _ = opteq("fit", "--help")
        examples = re.findall(r"^  (--(?:trainer|model|data)\S+) (\S+)", out, re.MULTILINE)
        assert (status, len(examples)) == (0, 11)
        options = [word for example in examples for word in example]
        with pytest.raises(SystemExit) as end:
            opteq("fit", "--config", "fashion-geq", *options, "--print_config")
        assert end.value.code == 0
        config = yaml.safe_load(capsys.readouterr().out)
        parts = config["model"]["network"]["init_args"]
        assert parts["body"]["init_args"]["solver"]["init_args"]["tol"] == 1e-4
        assert parts["stem"]["init_args"]["channels"] == 96

    @pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
    def test_help(self, opteq, arguments):
        status, out, _ = opteq(*arguments)
        assert status == 0
        for command in ("fit", "test", "validate", "predict", "show", "export", "reproduce"):
            assert re.search(rf"^  opteq {command} .+  \w", out, re.MULTILINE)

    @pytest.mark.parametrize("flag", ["--help", "-h"])
    @pytest.mark.parametrize("command", ["fit", "test", "validate"])
    def test_each_command_has_help_of_its_own(self, opteq, command, flag):
        status, out, _ = opteq(command, flag)
        assert status == 0
        assert f"\n  opteq {command} " in out
        assert f"`opteq {command} --help_all` lists" in out
        assert "opteq presets    " not in out
        assert max(map(len, out.splitlines())) <= 110

    @pytest.mark.parametrize("command", ["presets", "info"])
    def test_what_takes_no_options_says_so(self, opteq, command):
        status, out, _ = opteq(command, "--help")
        assert status == 0
        assert re.fullmatch(rf"opteq {command} .+ It takes no options\.\n(.+\n)?", out)

    def test_the_examples_of_a_training_are_accepted(self, opteq, capsys):
        _, out, _ = opteq("fit", "--help")
        first, again = (
            line.split()[1:] for line in out.splitlines() if line.startswith("  opteq fit --config d")
        )
        assert again == [*first, "--ckpt_path", "last"]
        with pytest.raises(SystemExit) as end:
            opteq(*first, "--print_config")
        assert end.value.code == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert config["model"]["network"]["init_args"]["body"]["init_args"]["solver"]["class_path"].endswith(
            "Picard"
        )

    def test_the_options_of_suites_are_told(self, opteq, capsys):
        _, out, _ = opteq("test", "--help")
        with pytest.raises(SystemExit):
            opteq("test", "--help_all")
        known = capsys.readouterr().out
        named = re.findall(r"^  (--\w+) ", out, re.MULTILINE)
        assert len(named) == 6
        assert all(f"{option} " in known for option in named)
        assert all(suite in out for suite in SUITES)

    def test_version(self, opteq):
        assert opteq("--version").out == "opteq 0.1.0\n"

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--help"],
            ["--version"],
            ["presets"],
            ["reproduce", "--list"],
            ["fit", "--config", "digitz"],
            ["fit", "--config", "cifar10-small", "--trainer.max_epochs", "5"],
            ["fit", "--config", "imagenette-geq-13m"],
            ["fit", "--config", "camvid-small-opteq", "--data.root", "nowhere"],
            ["test", "run", "--suite", "attaks"],
            ["predict", "digits", "nowhere"],
        ],
    )
    def test_what_needs_no_torch_does_not_wait_for_it(self, arguments):
        code = (
            f"import sys; from opteq.cli import main; main({arguments}); "
            "print([m for m in ('torch', 'lightning', 'jsonargparse', 'numpy') if m in sys.modules])"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"

    def test_dashes_in_the_names_of_options_are_underscores(self, opteq, capsys):
        options = ["--trainer.max-epochs=7", "--runs-dir", "a-b", "--print-config"]
        with pytest.raises(SystemExit) as end:
            opteq("fit", "--config", "cifar10-small", *options)
        assert end.value.code == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["trainer"]["max_epochs"], config["runs_dir"]) == (7, "a-b")

    def test_help_all_lists_the_options(self, opteq, capsys):
        with pytest.raises(SystemExit) as end:
            opteq("fit", "--help-all")
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert "--trainer.max_epochs" in out
        assert "--runs_dir" in out
