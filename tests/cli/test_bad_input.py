"""Mistakes of a user: one sentence that says what to do, status 2, no traceback."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from opteq.cli import main
from opteq.configs import presets
from opteq.system.locks import exclusive
from opteq.training.module import ClassifierModule


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opteq.evaluation.report.write_report", lambda *arguments: None)
        assert main(["fit", "--config", tiny, "--trainer.max_epochs", "1", "--runs_dir", str(runs)]) == 0
    return runs / "tiny"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["dance"],
            "There is no command dance; commands are fit, validate, test, predict, show, presets,",
        ),
        (["tets"], "There is no command tets; did you mean test?"),
        (["reproduce", "opteq-table55"], "nor a file; did you mean opteq-table5 or "),
        (["fit"], "Missing model.network, data; give a preset"),
        (["fit", "digits"], "did you mean --config digits?"),
        (["fit", "--config", "digitz"], "digitz is neither a preset nor a file; did you mean digits?"),
        (["fit", "--config", "my.yaml"], f"presets are {', '.join(sorted(p.name for p in presets()))}."),
        (["test", "--config", "digits"], "name a run (opteq test runs/digits) or a checkpoint"),
        (["validate", "nowhere"], "nowhere is not the folder of a run"),
        (["predict", "digits", ""], "Argument images: expected the name of a file or a folder, got an empty"),
        (["predict", "nowhere", "."], "nowhere holds no trained model"),
        (["predict", "digts", "."], "digts holds no trained model (model.json); did you mean digits?"),
        (["predict", "--config", "digits", "--images", "x"], "opteq predict needs a trained model"),
        (
            ["fit", "--config", "digits", "--ckpt_path", "last"],
            "runs/digits/checkpoints/last.ckpt to resume from",
        ),
        (["fit", "--config", "digits", "--ckpt_path", "a.ckpt"], "There is no checkpoint a.ckpt."),
        (["fit", "--config", "digits", "--run", "a/b"], "got 'a/b'"),
    ],
)
def test_commands(refuses, tmp_path, arguments, sentence):
    assert sentence in refuses(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_run_that_may_have_been_meant(run, refuses):
    assert f"; did you mean {run}?" in refuses("test", run.with_name("tinny"))
    assert f"; did you mean {run}?" in refuses("show", run.with_name("tinny"))


def test_a_run_is_found_by_its_name_alone(run, refuses, tmp_path):
    shutil.copytree(run, tmp_path / "runs" / "mine")
    for command in (["test"], ["validate"], ["show"], ["export"], ["predict", tmp_path]):
        name, *images = command
        for written in ("mine", "mines", "mine/"):
            assert "; did you mean runs/mine?" in refuses(name, written, *images)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "attaks"], "There is no suite 'attaks'; did you mean attacks?"),
        (["--suite", "none"], "There is no suite 'none'; suites are corruptions, attacks, ood"),
        (["--suite", "segmentation"], "is for segmentation, but Digits is for classification"),
        (["--suite", "ood"], "name a folder of them with --unknown"),
        (["--suite", "ood", "--unknown", "none"], "The folder none does not exist."),
        (["--suite", "subclasses"], "--data.superclasses true and --data.fold 0"),
        (["--suite", "attacks", "--epsilons", "8"], "sizes above 0 and up to 1, such as 1/255,0.03, got '8'"),
        (["--suite", "attacks", "--restarts", "0"], "Expected --restarts of at least 1, got 0"),
        (["--suite", "ood", "--epsilons", "0.1"], "--epsilons is an option of the suite attacks"),
        (["--suite_images", "9"], "--suite_images is an option of suites"),
    ],
)
def test_suites(run, refuses, options, sentence):
    assert sentence in refuses("test", run, *options)
    assert not (run / "evaluation").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--model.lr", "1"],
            "There is no option model.lr; there are model.adversary, model.class_weights",
        ),
        (["--trainer.max_epoch", "1"], "did you mean trainer.max_epochs"),
        (["--max_epochs=1"], "There is no option max_epochs; did you mean trainer.max_epochs"),
        (["--model.network.body.chanels", "1"], "Unit has no option chanels; did you mean channels"),
        (["--data.root", "x"], "Digits has no option root; there are augmentation, balanced"),
        (["--model.network", "Foo"], "Wrong value of model.network: there is no class Foo."),
        (["--model.network.body.solver", "Foo"], "model.network.body.solver: there is no class Foo."),
        (
            ["--model.network.body.solver", "Andersen"],
            "Wrong value of model.network.body.solver: there is no class Andersen; did you mean Anderson?",
        ),
        (["--model.network.body.solver=Anderson", "--model.network.body.solver.tols=1"], "did you mean tol?"),
        (
            ["--model.network.body.solver.tol", "1"],
            "Choose a class before its options: --model.network.body.solver Anderson (or Broyden, ",
        ),
        (
            ["--model.network.body.gradient.tol", "1"],
            "Choose a class before its options: --model.network.body.gradient Implicit (or OneStep, ",
        ),
        (
            ["--model.network.body.solver=Anderson", "--model.network.body.solver.memory=0"],
            "Expected `memory` of Anderson",
        ),
        (["--model.network.head.dropout", "2"], "`dropout` to be a probability from 0 to 1, got 2.0."),
        (["--model.network.body.activation", "foo"], "Expected `activation` to be one of"),
        (["--model.learning_rate", "abc"], "Wrong value of model.learning_rate: expected float"),
        (["--model.schedule", "abc"], "expected one of 'constant', 'cosine', 'step', 'linear', 'poly'"),
        (
            ["--model.network.head.classes", "7"],
            "set --model.network.head.classes null",
        ),
        (["--model.network.stem.in_channels", "3"], "does not take the images of Digits (1 channels, 8×8)"),
        (["--data.batch_size", "0"], "Expected `batch_size` of at least 1, got 0."),
        (["--data.val_fraction", "2"], "Expected `val_fraction` between 0 and 1, got 2.0."),
        (["--data.train_limit", "5000"], "Expected `train_limit` between 1 and 1293"),
        (["--trainer.accelerator", "tpu"], "torch_xla"),
        (["--trainer.devices", "abc"], "An option of --trainer does not fit: `devices` selected with"),
        (["--trainer.logger", "WandbLogger"], "needs the package wandb"),
        (["--trainer.logger", "wandb"], "needs the package wandb: pip install wandb."),
        (
            ["--trainer.logger", "mlflow"],
            "expected one of 'csv', 'tensorboard', 'wandb' or there is no class mlflow.",
        ),
        (
            ["--model.optimizer", "absent.optim.Lion"],
            "the module absent: no package of that name",
        ),
        (["--model.optimizer", "torch.optim.LBFGS"], "cannot be made (LBFGS doesn't support"),
        (
            ["--model.optimizer", "torch.optim.NAdam", "--model.optimizer.decay", "1"],
            "torch.optim.NAdam has no option decay; there are betas",
        ),
        (
            ["--model.optimizer", "torch.optim.NAdam", "--model.optimizer.lr", "1"],
            "set --model.learning_rate",
        ),
        (["--model.class_weights", "[1, 2]"], '`class_weights` to be "balanced" or 10 numbers'),
        (["--trainer.max_epochs", "-1"], "set --trainer.max_epochs"),
        (["--trainer.devices", "99999"], f"devices of at most {os.cpu_count()}, the processor cores"),
        (
            ["--model.network.stem.channels=2000000", "--model.network.body.hidden=2000000"],
            "There is no memory for 131 TiB at once, a weight of shape (2000000, 2000000, 3, 3);",
        ),
        (
            ["--data.augmentation=crop", "--model.network.stem.padding=200000"],
            "; lower --data.batch_size or the sizes of the network.",
        ),
        (["--trainer.callbacks+=opteq.training.ceiling.RisingCeiling"], "RisingCeiling has nothing to raise"),
        (
            ["--model.network.body.solver=Anderson", "--model.network.body.solver.tol=1e-9"],
            "tol=1e-09 cannot be reached in float32; use at least 2e-06 or a wider dtype.",
        ),
    ],
)
def test_options(refuses, tmp_path, tiny, options, sentence):
    assert sentence in refuses("fit", "--config", tiny, *options)
    # A training that was refused leaves no folder.
    assert list(tmp_path.glob("runs/*")) == []


def test_a_training_that_diverges(refuses, tiny):
    message = refuses("fit", "--config", tiny, "--model.learning_rate", "1e30")
    assert "lower --model.learning_rate" in message


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Grey images in the classes of scikit-learn's digits, in others, and in some of them."""
    root = tmp_path_factory.mktemp("folders")
    for folder, classes in (("same", "0123456789"), ("others", "abcdefghij"), ("some", "012")):
        for part, number in (("train", 12), ("test", 2)):
            for name in classes:
                (root / folder / part / name).mkdir(parents=True)
                for i in range(number):
                    image = Image.fromarray(np.full((8, 8), 10 * i, dtype=np.uint8))
                    image.save(root / folder / part / name / f"{i}.png")
    return root


class TestEvaluationOfOtherData:
    @pytest.mark.parametrize("command", ["test", "validate"])
    def test_other_classes_are_refused(self, refuses, run, folders, command):
        data = ("--data", "ImageFolder", "--data.image_size", 8, "--data.root")
        assert "missing 3, 4, 5, 6, 7, 8, 9; unknown none." in refuses(command, run, *data, folders / "some")
        assert "missing 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; unknown a, b, c" in refuses(
            command, run, *data, folders / "others"
        )

    def test_the_same_classes_in_the_channels_of_the_network(self, opteq, run, folders):
        data = ("--data", "ImageFolder", "--data.image_size", 8, "--data.root", folders / "same")
        status, out, err = opteq("test", run, *data)
        assert status == 0, err
        lines = out[out.index("class ") :].splitlines()
        assert lines[0].split() == ["class", "count", "recall", "precision", "F1"]
        assert [line.split()[:2] for line in lines[1:]] == [[str(digit), "2"] for digit in range(10)]

    def test_without_the_card_the_number_of_classes_is_compared(self, refuses, run, folders, tmp_path):
        shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "my.ckpt")
        data = ("--data", "ImageFolder", "--data.image_size", 8, "--data.root", folders / "some")
        sentence = refuses("test", "--config", run / "config.yaml", "--ckpt_path", "my.ckpt", *data)
        assert "some has 3 classes" in sentence
        assert "give data with the classes that it was trained on" in sentence

    def test_numbers_that_follow_from_the_data_are_not_those_of_the_preset(
        self, opteq, tiny, folders, tmp_path
    ):
        mine = tmp_path / "tiny.yaml"
        mine.write_text(
            Path(tiny).read_text().replace("train_limit: 128", "train_limit: 128, val_fraction: 0.3")
        )
        data = ("--data", "ImageFolder", "--data.image_size", 8, "--data.root", folders / "some")
        options = ("--report", "false", "--trainer.max_epochs", 1, "--config", mine)
        status, _, err = opteq("fit", *data, *options)
        assert status == 0, err
        config = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
        parts, of_data = config["model"]["network"]["init_args"], config["data"]["init_args"]
        found = [of_data[name] for name in ("train_limit", "val_fraction", "batch_size")]
        assert found == [None, 0.1, 64]
        assert (parts["stem"]["init_args"]["in_channels"], parts["head"]["init_args"]["classes"]) == (1, 3)
        # Before the configuration, options hold as well.
        assert config["trainer"]["max_epochs"] == 1
        assert opteq("fit", *data, "--data.train_limit", 5, *options).status == 0
        assert "train_limit: 5" in Path("runs/tiny-2/config.yaml").read_text()
        assert opteq("fit", *data, "--model.network.stem.in_channels", 3, *options).status == 0
        assert "in_channels: 3" in Path("runs/tiny-3/config.yaml").read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["runs/digits", "--help"], ["-h"]])
def test_the_help_of_predict_is_its_own(opteq, capsys, arguments):
    with pytest.raises(SystemExit) as end:
        opteq("predict", *arguments)
    assert end.value.code == 0
    assert "--output OUTPUT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["predict", "runs/digits"],
            "The following arguments are required: images; see opteq predict --help.",
        ),
        (["predict", "a", "b", "--outputs", "c"], "Unrecognized arguments: --outputs c"),
        (["predict", "a", "b", "--trust", "maybe"], "Argument --trust: invalid choice: 'maybe'"),
        (["reproduce", "--nonsense"], "Name the table that --nonsense is for"),
        (["fit", "--config"], "Argument -c/--config: expected one argument"),
    ],
)
def test_arguments_in_one_sentence(refuses, arguments, sentence):
    assert sentence in refuses(*arguments)


def test_names_that_are_not_text_are_printed(run, tmp_path):
    (tmp_path / "images").mkdir()
    for name, content in ((b"caf\xe9.png", None), (b"\xe9.png", b"no image")):
        path = os.fsencode(tmp_path / "images") + b"/" + name
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "zero.png")
        Path(os.fsdecode(path)).write_bytes(content or (tmp_path / "zero.png").read_bytes())
    arguments = [
        sys.executable,
        "-m",
        "opteq",
        "predict",
        run,
        tmp_path / "images",
        "--output",
        tmp_path / "p.csv",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Wrote 1 prediction" in done.stdout
    assert "\\udce9.png" in done.stdout
    assert "café.png" in (tmp_path / "p.csv").read_text(encoding="utf-8")


def test_unknown_key_in_a_file(refuses, tmp_path, tiny):
    (tmp_path / "my.yaml").write_text(Path(tiny).read_text() + "modle: {optimizer: sgd}\n")
    assert "There is no option modle.optimizer; did you mean model.optimizer?" in refuses(
        "fit", "--config", "my.yaml"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"model: [\n", "my.yaml is not valid YAML: while parsing"),
        (b"\xff\xfe\x00", "my.yaml is not a text file"),
        (b"", "Expected my.yaml to hold options such as trainer: {max_epochs: 5}, got None."),
        (b"- 1\n", "to hold options such as trainer: {max_epochs: 5}, got [1]."),
    ],
)
def test_file_that_is_no_configuration(refuses, tmp_path, content, sentence):
    (tmp_path / "my.yaml").write_bytes(content)
    assert sentence in refuses("fit", "--config", "my.yaml")


class TestData:
    @pytest.fixture
    def fit(self, refuses, tmp_path):
        """Fits a colour network to the image folder in the current folder."""

        def run(*options):
            return refuses(
                "fit", "--model.network=ImageClassifier", "--model.network.stem=opteq.models.stems.ConvStem",
                "--model.network.body=Unit", "--model.network.head=Head",
                "--data=ImageFolder", f"--data.root={tmp_path}", "--data.image_size=8",
                "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", *options,
            )  # fmt: skip

        return run

    @pytest.fixture
    def images(self, tmp_path):
        for part in ("train", "test"):
            for name in "ab":
                (tmp_path / part / name).mkdir(parents=True)
                for i in range(10):
                    pixels = np.full((8, 8, 3), 10 * i, dtype=np.uint8)
                    Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
        return tmp_path

    def test_missing_set(self, refuses, tmp_path):
        assert "--data.root" in refuses("fit", "--config", "cifar10-small")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--data.rot", "x"], "data.rot"),
            (["--data.download", "maybe"], "data.download"),
            (["--data", "Digits", "--data.batch_size", "0"], "batch_size"),
        ],
    )
    def test_what_is_wrong_with_the_options_is_told_of_before_a_missing_set(self, refuses, options, sentence):
        assert sentence in refuses("fit", "--config", "cifar10-small", *options)

    def test_a_set_that_the_options_name_is_looked_for_there(self, refuses, tmp_path):
        (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
        said = refuses("fit", "--config", "cifar10-small", "--data.root", "elsewhere")
        assert "missing or damaged in elsewhere/cifar-10-batches-py" in said

    def test_missing_folder(self, fit):
        assert "train does not exist" in fit()

    def test_empty_folder(self, fit, tmp_path):
        (tmp_path / "train" / "a").mkdir(parents=True)
        assert f"The folder {tmp_path}/train/a holds no images" in fit()

    def test_unreadable_image(self, fit, images):
        (images / "train" / "a" / "3.png").write_bytes(b"not an image")
        assert "Could not read the image" in fit()

    def test_unreadable_image_in_a_worker(self, fit, images, monkeypatch):
        monkeypatch.setattr("opteq.data.images.MEMORY_BUDGET_BYTES", 0)
        (images / "train" / "a" / "3.png").write_bytes(b"not an image")
        sentence = fit("--data.num_workers=1", "--data.batch_size=4")
        assert sentence.startswith("Could not read the image")

    def test_nan_pixels(self, fit, images):
        pixels = np.full((8, 8), np.nan, dtype=np.float32)
        Image.fromarray(pixels).save(images / "train" / "a" / "nan.tiff")
        assert "floating-point" in fit()

    def test_wrong_number_of_classes(self, fit, images):
        assert "has 2 classes" in fit("--model.network.head.classes=3")

    def test_images_too_small_for_the_network(self, fit, images):
        sentence = fit("--model.network.body=Gaussian", "--data.image_size=7")
        assert "The network does not take the images of" in sentence

    def test_nan_in_a_batch(self, tiny, refuses, monkeypatch):
        def spoil(self, batch):
            images, labels = batch
            images = images.float()
            images[1] = float("nan")
            return images, labels

        monkeypatch.setattr("opteq.data.preprocess.Preprocess.__call__", spoil)
        assert "NaN or infinite values in samples 1" in refuses("fit", "--config", tiny)


class TestCheckpoints:
    @pytest.fixture
    def copy(self, run, tmp_path):
        shutil.copytree(run, tmp_path / "runs" / "tiny")
        return tmp_path / "runs" / "tiny"

    @pytest.mark.parametrize("command", ["fit", "test"])
    def test_truncated(self, refuses, tiny, copy, command):
        for name in ("best.ckpt", "last.ckpt"):
            path = copy / "checkpoints" / name
            path.write_bytes(path.read_bytes()[:1000])
        arguments = ("--config", tiny, "--ckpt_path", "last") if command == "fit" else (copy,)
        assert "is truncated or not a checkpoint" in refuses(command, *arguments)

    @pytest.mark.parametrize("command", ["fit", "test", "predict"])
    def test_of_another_model(self, refuses, tiny, copy, command, tmp_path):
        checkpoint = copy / "checkpoints" / "best.ckpt"
        extra = ("--images", tmp_path) if command == "predict" else ()
        sentence = refuses(
            command, "--config", tiny, "--ckpt_path", checkpoint, "--model.network.stem.channels", 6, *extra
        )
        assert "The checkpoint is from another model" in sentence

    @pytest.mark.parametrize("command", ["fit", "fit elsewhere", "validate", "test", "predict"])
    @pytest.mark.parametrize(
        ("spoil", "sentence"),
        [
            (
                lambda w: w.fill_(math.nan),
                "holds weights that are NaN or infinite in torch.float32, among them",
            ),
            (lambda w: w.bool(), "holds no weights for this network:"),
        ],
        ids=["diverged", "truth values"],
    )
    def test_of_useless_weights(self, refuses, tiny, copy, tmp_path, command, spoil, sentence):
        name = "network.body.map.injection.bias"
        for file in ("best.ckpt", "last.ckpt"):
            checkpoint = torch.load(copy / "checkpoints" / file, weights_only=True)
            checkpoint["state_dict"][name] = spoil(checkpoint["state_dict"][name])
            torch.save(checkpoint, copy / "checkpoints" / file)
        path = copy / "checkpoints" / "best.ckpt"
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "0.png")
        arguments = {
            "fit": ("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 2),
            "fit elsewhere": ("fit", "--config", tiny, "--ckpt_path", path, "--run", "other"),
            "predict": ("predict", "--config", tiny, "--ckpt_path", path, "--images", tmp_path),
        }
        found = refuses(*arguments.get(command, (command, copy)))
        file = "last.ckpt" if command == "fit" else "best.ckpt"
        assert f"runs/tiny/checkpoints/{file} {sentence} {name}" in found
        assert not (tmp_path / "runs" / "other").exists()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("validated", [True, False])
    def test_a_training_that_diverges_in_its_last_step_keeps_the_last_finite_checkpoint(
        self, refuses, opteq, tiny, tmp_path, monkeypatch, validated, value
    ):
        epochs = 0

        def diverge(self, *_):
            # In the last of the two steps of an epoch, behind its loss.
            if self.global_step == 2 * epochs - 1:
                self.network.head[-1].bias.data[3] = value

        monkeypatch.setattr(ClassifierModule, "on_before_zero_grad", diverge)
        command = ["fit", "--config", tiny, "--run", "one"]
        command += [] if validated else ["--trainer.limit_val_batches", 0]
        epochs = 1
        assert refuses(*command) == (
            "The training diverged in epoch 0: weights are NaN or infinite, among them"
            " network.head.4.bias. There is no checkpoint before it: start anew with"
            " --trainer.gradient_clip_val 1 or a lower --model.learning_rate."
        )
        assert list((tmp_path / "runs" / "one").rglob("*.ckpt")) == []
        epochs = 2
        sentence = refuses(*command)
        last = tmp_path / "runs" / "one-2" / "checkpoints" / "last.ckpt"
        assert "diverged in epoch 1" in sentence
        assert "runs/one-2/checkpoints/last.ckpt is still that of the epoch before: go on from it" in sentence
        assert torch.load(last, weights_only=True)["epoch"] == 0
        epochs = 0
        more = ["--ckpt_path", "last", "--run", "one-2", "--trainer.gradient_clip_val", 1]
        assert all(str(word) in sentence for word in more)
        assert opteq(*command, *more).status == 0
        assert torch.load(last, weights_only=True)["epoch"] == 1

    def test_configuration_that_is_not_text(self, refuses, copy):
        (copy / "config.yaml").write_bytes(b"\xff\x00")
        assert "config.yaml is not a text file" in refuses("test", copy)

    @pytest.mark.parametrize("command", ["fit", "reproduce"])
    def test_a_folder_in_which_another_process_is_at_work(self, refuses, tiny, copy, command, tmp_path):
        before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        options = {
            "fit": ("--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 2),
            "reproduce": ("opteq-table5", "--output", copy),
        }
        with exclusive(copy):
            assert "Another process is at work in" in refuses(command, *options[command])
        assert {path: path.read_bytes() for path in before} == before
        assert not (copy / "plan.json").exists()

    @pytest.mark.parametrize(
        ("output", "sentence"), [("none/p.csv", "The folder none does not exist"), (".", "is a folder")]
    )
    def test_predictions_without_a_place(self, refuses, copy, tmp_path, output, sentence):
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "0.png")
        assert sentence in refuses("predict", copy, tmp_path, "--output", output)

    def test_unreadable_images_are_skipped_and_named(self, opteq, copy, tmp_path):
        (tmp_path / "images").mkdir()
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "images" / "0.png")
        (tmp_path / "images" / "1.png").write_bytes(b"not an image")
        status, out, _ = opteq("predict", copy, "images")
        found, first, second = out.splitlines()
        assert status == 0
        assert found.startswith("images/0.png: ")
        assert first == f"Wrote 1 prediction to {copy}/predictions.csv."
        assert second.startswith("Skipped: Could not read the image images/1.png")

    def test_truncated_weights(self, refuses, copy, tmp_path):
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        assert "truncated" in refuses("predict", copy, tmp_path)

    def test_a_run_without_write_permission(self, refuses, tiny, tmp_path):
        (tmp_path / "runs").write_text("a file, not a folder")
        assert "runs" in refuses("fit", "--config", tiny)


@pytest.mark.parametrize("command", ["presets", "--version"])
def test_a_reader_that_has_seen_enough_is_no_mistake(command):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        arguments = [sys.executable, "-m", "opteq", command]
        done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
