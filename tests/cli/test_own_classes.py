"""Classes of a user's own, in a file of the current folder, through the whole of the command."""

import csv
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from opteq.cli import main
from opteq.errors import ConfigError
from opteq.models.loading import load

MINE = '''
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opteq
from opteq.activations import ReLU
from opteq.options import strict_options
from opteq.solvers.base import Solver


@strict_options
@dataclass(frozen=True)
class Halpern(Solver):
    """Anchored iteration."""

    tol: float = 1e-1
    max_steps: int = 500

    def start(self, x):
        anchor, count = x, 1

        def advance(x, f, g, changes):
            nonlocal count
            count += 1
            return torch.lerp(f, anchor, 1 / count)

        return advance


class Body(nn.Module):
    """Two equilibria, the second one added to the first."""

    def __init__(self, hidden: int, channels: int | None = None, first: Solver | None = None) -> None:
        super().__init__()
        self.first = opteq.EquilibriumLayer(self.unit(channels, hidden), first, on_unconverged="count")
        self.second = opteq.EquilibriumLayer(self.unit(channels, hidden))

    def unit(self, channels, hidden):
        return opteq.OptEqUnit(opteq.Conv2d(channels, hidden), opteq.Conv2d(channels, hidden))

    def forward(self, x):
        z = self.first(x)
        return z + self.second(z)


class Convolution(opteq.Conv2d):
    """An operator."""


class Unit(opteq.OptEqUnit):
    """A map."""


class Activation(ReLU):
    """An activation."""


class Gradient(opteq.Implicit):
    """A gradient method."""


class Norm(opteq.SquaredNorm):
    """A regulariser."""


class Halves(LightningDataModule):
    """Images that are brighter in their upper or in their lower half."""

    class_names = ("upper", "lower")

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.size = size

    def setup(self, stage):
        labels = torch.arange(64) % 2
        images = torch.rand(64, 1, self.size, self.size, generator=torch.Generator().manual_seed(0)) / 2
        for image, label in zip(images, labels):
            image[:, label * self.size // 2 : (label + 1) * self.size // 2] += 0.5
        self.images = TensorDataset(images, labels)

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.images, batch_size=16)

    test_dataloader = val_dataloader
'''

CONFIG = """
model:
  network:
    class_path: opteq.models.classifier.ImageClassifier
    init_args:
      stem: {class_path: opteq.models.stems.ConvStem, init_args: {channels: 4}}
      body: {class_path: mine.Body, init_args: {hidden: 6, first: {class_path: mine.Halpern}}}
      head: {class_path: opteq.models.heads.Head, init_args: {pool: 2}}
  optimizer: adamw
  learning_rate: 2.0e-2
data: {class_path: mine.Halves}
trainer: {accelerator: cpu, max_epochs: 6, enable_progress_bar: false}
"""

# Nothing but the names of classes: every kind of object that an equilibrium layer is made of.
OPERATOR = {"class_path": "mine.Convolution", "init_args": {"in_channels": 4, "out_channels": 6}}
UNIT = {"W": OPERATOR, "U": OPERATOR, "activation": {"class_path": "mine.Activation"}}
REGULARISED = {
    "class_path": "opteq.Regularised",
    "init_args": {
        "map": {"class_path": "mine.Unit", "init_args": UNIT},
        "regulariser": {"class_path": "mine.Norm"},
        "gamma": 0.1,
    },
}
LAYER = {
    "class_path": "opteq.EquilibriumLayer",
    "init_args": {
        "map": REGULARISED,
        "solver": {"class_path": "mine.Halpern", "init_args": {"tol": 0.2}},
        "gradient": {"class_path": "mine.Gradient", "init_args": {"tol": 0.01}},
        "on_unconverged": "count",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MINE)
    (folder / "my.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def command(folder):
    """The installed command, in the user's folder."""

    def run(*arguments):
        # As for the installed script, Python itself does not look into the current folder.
        arguments = [sys.executable, "-P", "-m", "opteq", *map(str, arguments)]
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def run(folder, command):
    assert "look at runs/my/report.html" in command("fit", "--config", "my.yaml")
    return folder / "runs" / "my"


def test_a_network_a_solver_and_data_of_ones_own_are_trained_and_tested(run, command):
    config = yaml.safe_load((run / "config.yaml").read_text())
    parts = config["model"]["network"]["init_args"]
    assert parts["body"]["init_args"]["channels"] == 4
    assert parts["head"]["init_args"]["classes"] == 2
    assert parts["stem"]["init_args"]["in_channels"] == 1
    out = command("test", "runs/my", "--trust", "true")
    (accuracy,) = (float(line.split()[1]) for line in out.splitlines() if "test_accuracy" in line)
    assert accuracy > 0.9
    page = (run / "report.html").read_text()
    assert "OptEqUnit on Halves" in page


def test_images_are_classified(run, command, folder):
    (folder / "images").mkdir(exist_ok=True)
    pixels = np.full((8, 8), 60, dtype=np.uint8)
    pixels[4:] = 200
    Image.fromarray(pixels).save(folder / "images" / "a.png")
    command("predict", "runs/my", "images", "--trust", "true")
    with (run / "predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["label"], row["converged"]) == ("lower", "True")


@pytest.mark.parametrize("arguments", [("test",), ("validate",), ("predict", "images")])
def test_what_a_run_names_is_not_imported_unless_it_is_trusted(run, folder, capsys, arguments):
    (folder / "images").mkdir(exist_ok=True)
    name, *rest = arguments
    assert main([name, str(run), *[str(folder / part) for part in rest]]) == 2
    assert "It uses mine.Body" in (err := capsys.readouterr().err)
    assert "--trust true" in err
    assert "mine" not in sys.modules


def test_every_kind_of_object_is_loaded_in_python_when_it_is_trusted(run, folder, command):
    config = yaml.safe_load(CONFIG)
    config["model"]["network"]["init_args"]["body"] = LAYER
    config["trainer"]["max_epochs"] = 1
    (folder / "kinds.yaml").write_text(yaml.safe_dump(config))
    options = ("--model.network.body.map.map.W.kernel_size", "5", "--report", "false")
    command("fit", "--config", "kinds.yaml", *options)
    code = """if True:
        import opteq, torch
        network = opteq.load("runs/my", trust=True)
        print(type(network.body).__module__, network(torch.rand(3, 1, 8, 8)).shape, network.body.first.solver)
        layer = opteq.load("runs/kinds", trust=True).body
        unit = layer.map.map
        parts = layer.map, unit, unit.W, unit.activation, layer.map.regulariser, layer.solver, layer.gradient
        U = unit.injection.operator
        print([type(part).__name__ for part in parts], unit.W.kernel_size, U.kernel_size)
        opteq.load("runs/my")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    kinds = ["Regularised", "Unit", "Convolution", "Activation", "Norm", "Halpern", "Gradient"]
    assert done.stdout.splitlines() == [
        "mine torch.Size([3, 2]) Halpern(tol=0.1, max_steps=500)",
        f"{kinds} 5 3",
    ], done.stderr
    assert "ConfigError: It uses mine.Body, and only classes of opteq" in done.stderr


def test_a_table_may_be_of_ones_own_classes(folder, command):
    table = {
        "title": "Mine",
        "source": "None",
        "reference": "mine",
        "config": {"base": "my.yaml"},
        "measure": ["opteq.experiments.measures.relative_residual"],
        "columns": ["test_accuracy", "residual"],
        "rows": [{"name": "mine", "changes": {"model.network.body.first.tol": 0.05}}],
    }
    (folder / "table.yaml").write_text(yaml.safe_dump(table))
    command("reproduce", "table.yaml", "--trainer.max_epochs", 1)
    *_, row = (folder / "reproduced" / "small" / "table" / "table.md").read_text().splitlines()
    _, name, seeds, accuracy, residual, *_ = (cell.strip() for cell in row.split("|"))
    assert (name, seeds) == ("mine", "1")
    assert 0 < float(residual) < 0.05
    assert float(accuracy) >= 0


@pytest.mark.parametrize(
    ("name", "old", "new", "sentence"),
    [
        ("nameless", "class_names = ", "names = ", "Expected Halves to have `class_names`, a list with"),
        (
            "unlabelled",
            "Dataset(images, labels)",
            "Dataset(images)",
            "Expected batches (images, labels) of Halves",
        ),
    ],
)
def test_what_data_lacks_is_said_in_one_sentence(refuses, tmp_path, monkeypatch, name, old, new, sentence):
    assert old in MINE
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text(MINE.replace(old, new))
    (tmp_path / "my.yaml").write_text(CONFIG.replace("mine.", f"{name}."))
    assert refuses("fit", "--config", "my.yaml").startswith(sentence)


@pytest.fixture
def own(opteq, tmp_path, monkeypatch):
    """Trains for an epoch with a configuration and a module of the user's own."""

    def fit(name, source, config):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
        return opteq("fit", "--config", "my.yaml", "--trainer.max_epochs", 1)

    return fit


def with_body(module, body):
    config = yaml.safe_load(CONFIG.replace("mine.", f"{module}."))
    config["model"]["network"]["init_args"]["body"] = body
    return config


def similarity_layer(**similarity):
    convolution = {
        "class_path": "opteq.Conv2d",
        "init_args": {"in_channels": 4, "out_channels": 4, "kernel_size": 1},
    }
    options = {"channels": 4, "activation": "tanh", "U": convolution, **similarity}
    return {
        "class_path": "opteq.EquilibriumLayer",
        "init_args": {"map": {"class_path": "opteq.SimilarityMap", "init_args": options}},
    }


FUNCTION = (
    MINE
    + """

def saturating(y: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return ((c * y) - 0.1 * torch.log1p(y.square())).flatten(1).sum(1)
"""
)


def test_a_function_by_its_name_is_found_again(own, tmp_path):
    layer = similarity_layer(similarity="functions.saturating")
    result = own("functions", FUNCTION, with_body("functions", layer))
    assert result.status == 0, result.err
    with pytest.raises(ConfigError, match=r"It uses functions\.saturating, and only classes of opteq"):
        load("runs/my")
    network = load("runs/my", trust=True)
    x, body = torch.rand(2, 4, 3, 3), network.body
    y = body(x)
    c = torch.nn.functional.conv2d(x, body.map.U.weight).detach()
    # y = tanh(∇S(y)) with the gradient by hand.
    torch.testing.assert_close(y, torch.tanh(c - 0.2 * y / (1 + y.square())), rtol=0, atol=1e-2)


ENUMERATION = (
    MINE
    + """

from enum import Enum

class Kind(Enum):
    SMALL = 1

class Chosen(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, kind.value)

    def forward(self, x):
        return self.layer(x)
"""
)


def test_what_could_not_be_loaded_again_is_not_trained(own, tmp_path):
    result = own(
        "enumerations",
        ENUMERATION,
        with_body("enumerations", {"class_path": "enumerations.Chosen", "init_args": {"kind": "SMALL"}}),
    )
    assert result.status == 2
    assert "could not be built again of its configuration ('str' object has no" in result.err
    assert not (tmp_path / "runs").exists()


def test_data_without_validation(own, opteq, refuses):
    source = MINE.replace("def val_dataloader", "def test_dataloader").replace(
        "test_dataloader = val_dataloader", ""
    )
    result = own("blind", source, yaml.safe_load(CONFIG.replace("mine.", "blind.")))
    assert result.status == 0, result.err
    assert "of the last checkpoint" in result.out
    assert opteq("test", "runs/my", "--trust", "true").status == 0
    assert "Expected Halves to have `val_dataloader`" in refuses("validate", "runs/my", "--trust", "true")


@pytest.mark.parametrize("nothing", ["None", "[]"])
def test_data_whose_validation_is_empty(own, nothing):
    source = MINE.replace("    test_dataloader = val_dataloader\n", "").replace(
        "def val_dataloader", "def test_dataloader"
    )
    source += f"\n    def val_dataloader(self):\n        return {nothing}\n"
    name = f"nothing{len(nothing)}"
    result = own(name, source, yaml.safe_load(CONFIG.replace("mine.", f"{name}.")))
    assert result.status == 0, result.err
    assert "of the last checkpoint" in result.out


def test_data_without_tests(own):
    source = MINE.replace("test_dataloader = val_dataloader", "")
    result = own("untested", source, yaml.safe_load(CONFIG.replace("mine.", "untested.")))
    assert result.status == 2
    assert "Expected Halves to have `test_dataloader`" in result.err
