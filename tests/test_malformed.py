"""Bad calls and files, more than a thousand of them: each is refused in one sentence, and none does harm."""

import json
import os
import pickle
import warnings
from inspect import signature
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

import opteq
from opteq.configs import read_config
from opteq.data.digits import Digits
from opteq.data.folder import ImageFolder
from opteq.data.segmentation import SegmentationFolder
from opteq.errors import ConfigError, OpteqError
from opteq.evaluation.record import TestRecord as Record  # pytest would take it for a test
from opteq.models.heads import Head, PixelHead, ResNetHead
from opteq.models.loading import ModelCard, load, save_network
from opteq.models.stems import ConvStem, PooledStem, ResNetStem
from opteq.training.checkpoints import read_checkpoint
from opteq.training.predict import predict_images

# What options of plain types cannot be, and what others cannot.
PLAIN = {
    "int": [None, "three", 1.5, nan, -1, [2]],
    "float": [None, "much", nan, -inf, [0.5], 1j],
    "bool": [None, "maybe", 2, 0.5],
    "str": [None, "nonsense", 3, ["zero"]],
}
OBJECTS = [object(), "nonsense", 3.5, nan, [], {}, torch.zeros(3)]


def dense():
    return opteq.Dense(2, 3)


def unit():
    return opteq.OptEqUnit(dense(), dense())


def convolutional():
    return opteq.OptEqUnit(opteq.Conv2d(2, 3), opteq.Conv2d(2, 3))


# What classes cannot be made without.
NEEDED = {
    "in_channels": lambda: 2,
    "out_channels": lambda: 3,
    "W": dense,
    "U": dense,
    "map": unit,
    "matrix": lambda: torch.eye(2),
    "channels": lambda: 2,
    "factor": lambda: 2,
    "unit": unit,
    "units": lambda: [convolutional(), convolutional()],
    "maps": lambda: [unit(), unit()],
    "deep": lambda: opteq.DeepOptEq([unit(), unit()]),
    "mixing": lambda: torch.eye(3),
    "regulariser": opteq.SquaredNorm,
    "similarity": lambda: lambda y, c: (c * y).sum(1),
    "gamma": lambda: 0.1,
    "steps": lambda: 5,
}
CLASSES = [cls for name in opteq.__all__ if isinstance(cls := getattr(opteq, name), type)]


def bad_values(annotation):
    kinds = [kind.strip() for kind in annotation.split("|")]
    values = next((PLAIN[kind] for kind in kinds if kind in PLAIN), OBJECTS)
    if "None" in kinds:
        values = [value for value in values if value is not None]
    if any("Sequence" in kind for kind in kinds):
        values = [value for value in values if not isinstance(value, list)]
    return values


def refuses(call):
    """Whether a call ends in one sentence of an exception that a user expects; the report if not."""
    try:
        call()
    except (OpteqError, ValueError, TypeError) as error:
        sentence = str(error)
        return None if "\n" not in sentence and sentence.endswith((".", "?")) else f"says {sentence!r}"
    except Exception as error:
        return f"raises {error!r}"
    return "is accepted"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_options_of_every_class(cls):
    parameters = [p for p in signature(cls).parameters.values() if p.kind != p.VAR_POSITIONAL]
    needed = {p.name for p in parameters if p.default is p.empty}
    failures = []
    for parameter in parameters:
        for value in bad_values(str(parameter.annotation)):
            options = {name: NEEDED[name]() for name in needed} | {parameter.name: value}
            if failure := refuses(lambda options=options: cls(**options)):
                failures.append(f"{parameter.name}={value!r} {failure}")
        if parameter.name in ("in_channels", "out_channels"):
            options = {name: NEEDED[name]() for name in needed} | {parameter.name: 2**70}
            assert refuses(lambda options=options: cls(**options)) is None
    assert failures == []


INPUTS = {
    "nothing": None,
    "list": [1.0, 2.0],
    "array": np.zeros((2, 2)),
    "text": "x",
    "number": 3,
    "tuple": (torch.zeros(2, 2),),
    "scalar": torch.tensor(1.0),
    "vector": torch.zeros(2),
    "other channels": torch.zeros(2, 5),
    "other dimensions": torch.zeros(2, 2, 2),
    "no channels": torch.zeros(2, 0),
    "integers": torch.zeros(2, 2).long(),
    "bool": torch.zeros(2, 2).bool(),
    "complex": torch.zeros(2, 2, dtype=torch.complex64),
    "NaN": torch.full((2, 2), nan),
    "infinite": torch.full((2, 2), inf),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_every_function(name):
    layer = opteq.EquilibriumLayer(unit())
    classifier = nn.Sequential(layer, nn.Linear(2, 2)).eval()
    x = INPUTS[name]
    calls = {
        "layer": lambda: layer(x),
        "solve": lambda: layer.solve(x),
        "certify": lambda: opteq.certify(layer, x),
        "robust_radius": lambda: opteq.robust_radius(classifier, x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {call: failure for call in calls if (failure := refuses(calls[call]))} == {}


@pytest.mark.parametrize("module", [None, 3, "x", nn.Linear, [nn.Linear(2, 2)]], ids=str)
def test_what_is_no_module(module):
    def log():
        with opteq.solve_log(module):
            pass

    calls = [
        log,
        lambda: opteq.settle_norms(module),
        lambda: opteq.from_feedforward(module),
        lambda: opteq.certify(module, torch.zeros(2, 2)),
        lambda: opteq.robust_radius(module, torch.zeros(2, 2)),
        lambda: load(module),
    ]
    assert [failure for call in calls if (failure := refuses(call))] == []


COUNTED = {
    ConvStem: ("in_channels", "channels"),
    PooledStem: ("in_channels", "channels", "factor"),
    ResNetStem: ("in_channels",),
    Head: ("channels", "classes", "branches", "pool"),
    ResNetHead: ("channels", "classes"),
    PixelHead: ("channels", "classes"),
}


@pytest.mark.parametrize("cls", COUNTED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("value", [0, -1, 1.5, nan, "3", [3], True, 2**70], ids=str)
def test_sizes_of_stems_and_heads(cls, value):
    good = {"in_channels": 3, "channels": 8, "classes": 5}
    accepted = {name: number for name, number in good.items() if name in signature(cls).parameters}
    failures = {name: refuses(lambda name=name: cls(**accepted | {name: value})) for name in COUNTED[cls]}
    assert {name: failure for name, failure in failures.items() if failure} == {}


class Harm:
    """What a hostile pickle would do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def harm(tmp_path):
    """A hostile object; at the end nothing of what it would do may have been done."""
    yield Harm(tmp_path / "harm")
    assert not (tmp_path / "harm").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_checkpoints(tmp_path, harm):
    path = tmp_path / "a.ckpt"
    for content in (b"", b"text", b"PK\3\4" + bytes(50), pickle.dumps(harm), pickle.dumps({"epoch": 1})):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.ckpt is "):
            read_checkpoint(path)
    for content in (harm, [1], 3, {}, {"epoch": "1", "state_dict": {}}, {"epoch": 1, "state_dict": {"a": 3}}):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=r"a\.ckpt is "):
            read_checkpoint(path)
    torch.save({"epoch": 1, "state_dict": {"a": torch.zeros(1000)}}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, len(whole) // 20):
        path.write_bytes(whole[:length])
        assert refuses(lambda: read_checkpoint(path)) is None


# Nine lists of nine references each: 9⁹ values.
BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (BOMB, "repeats itself without end or too often"),
        ("a: &a {b: *a}", "repeats itself without end"),
        ("!!python/object/apply:os.mkdir ['harm']", "is not valid YAML"),
        ("[" * 800 + "]" * 800, "is nested too deeply"),
        ("[" * 5_000, "nest(ed too deeply|ing depth)"),
        ("\ta: 1", "is not valid YAML"),
        ("\0", "is not valid YAML"),
        ("base: a.yaml", "is its own base"),
        ("base: [1]", "neither a preset nor a file"),
        ("3", "to hold options"),
        ("null", "to hold options"),
    ],
)
def test_configurations(tmp_path, monkeypatch, content, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        read_config("a.yaml")
    assert os.listdir() == ["a.yaml"]


GOOD_CARD = ModelCard({"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}},
                      ("a", "b"), 1, 2, (0.5,), (0.25,))  # fmt: skip


@pytest.fixture
def run(tmp_path):
    save_network(tmp_path, nn.Linear(4, 2), GOOD_CARD)
    assert isinstance(load(tmp_path), nn.Linear)
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        {"network": 3},
        {"network": {"class_path": 3}},
        {"network": {"class_path": "os.mkdir", "init_args": {"path": "harm"}}},
        {"network": {"class_path": "opteq.cli.os.mkdir", "init_args": {"path": "harm"}}},
        {"network": {"class_path": "torch.nn.modules.os.mkdir"}},
        {"network": {"class_path": "torch.nn.Nothing"}},
        {"network": {"class_path": "torch.nn.Linear", "init_args": [1]}},
        {"network": {"class_path": "torch.nn.Linear", "init_args": {"features": 1}}},
        {"network": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 3}}},
        {"network": {"class_path": "opteq.models.heads.Head", "init_args": {"channels": -1, "classes": 2}}},
        {"class_names": 3},
        {"class_names": [1, 2]},
        {"in_channels": 0},
        {"in_channels": "1"},
        {"image_size": 0},
        {"image_size": "8"},
        {"image_size": [8, -8]},
        {"mean": 0.5},
        {"mean": [0.5, 0.5]},
        {"mean": [nan]},
        {"std": [0.0]},
        {"std": ["x"]},
        {"task": "poetry"},
        {"bogus": 1},
    ],
    ids=str,
)
def test_cards_of_models(run, monkeypatch, change):
    monkeypatch.chdir(run)
    card = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(card | change))
    assert refuses(lambda: load(run)) is None
    assert not (run / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"3"])
@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_files_of_models_that_are_something_else(run, name, content):
    (run / name).write_bytes(content)
    assert refuses(lambda: load(run)) is None


def test_truncated_files_of_models(run):
    for name in ("model.json", "model.safetensors"):
        whole = (run / name).read_bytes()
        for length in range(0, len(whole) - 2, max(1, len(whole) // 25)):
            (run / name).write_bytes(whole[:length])
            assert refuses(lambda: load(run)) is None, (name, length)
        (run / name).write_bytes(whole)


def test_records(tmp_path, harm):
    path = tmp_path / "record.npz"
    for content in (b"", b"text", b"PK\3\4" + bytes(50), pickle.dumps(harm)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"record\.npz"):
            Record.load(path)
    np.savez(path, labels=np.array([harm], dtype=object))
    with pytest.raises(ConfigError, match=r"record\.npz"):
        Record.load(path)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": -3},
        {"num_workers": -1},
        {"val_fraction": nan},
        {"val_fraction": 1.0},
        {"train_limit": 0},
        {"train_limit": 10**9},
        {"classes": []},
        {"classes": ["0"]},
        {"classes": ["0", "0"]},
        {"classes": ["0", "zero"]},
        {"superclasses": True},
    ],
    ids=str,
)
def test_options_of_data(options):
    def prepare():
        Digits(**options).setup("fit")

    assert refuses(prepare) is None


def test_folders_of_images(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "train" / "a").mkdir(parents=True)
    calls = []
    for root in ("nowhere", "file", "", "train"):
        calls += [
            lambda root=root: ImageFolder(str(tmp_path / root)).setup("fit"),
            lambda root=root: SegmentationFolder(str(tmp_path / root), (4, 4)).setup("fit"),
            lambda root=root: predict_images(nn.Linear(4, 2), GOOD_CARD, tmp_path / "none" / root),
        ]
    calls += [lambda size=size: ImageFolder(str(tmp_path), image_size=size) for size in (0, -1)]
    calls += [lambda: ImageFolder(str(tmp_path), in_channels=4), lambda: SegmentationFolder("x", (0, 4))]
    assert [failure for call in calls if (failure := refuses(call))] == []
    assert sorted(os.listdir(tmp_path)) == ["file", "train"]
