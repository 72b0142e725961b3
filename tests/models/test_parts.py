"""Objects built from configurations: what is filled in, and what is trusted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opteq
from opteq.errors import ConfigError
from opteq.models.bodies import Unit
from opteq.models.loading import ModelCard, load, save_network
from opteq.models.parts import build, check_trusted, complete

NETWORK = {
    "class_path": "opteq.models.classifier.ImageClassifier",
    "init_args": {
        "stem": {
            "class_path": "opteq.models.stems.ConvStem",
            "init_args": {"channels": 6, "in_channels": None},
        },
        "body": {"class_path": "opteq.models.bodies.Unit"},
        "head": {"class_path": "opteq.models.heads.Head", "init_args": {"pool": 2}},
    },
}


def completed(**parts):
    network = copy.deepcopy(NETWORK)
    network["init_args"] |= parts
    complete(network, in_channels=1, classes=7)
    return network["init_args"]


def test_numbers_that_are_left_out_follow_from_the_data_and_the_stem():
    parts = completed()
    assert parts["stem"]["init_args"] == {"channels": 6, "in_channels": 1}
    assert parts["body"]["init_args"] == {"channels": 6}
    assert parts["head"]["init_args"] == {"pool": 2, "channels": 6, "classes": 7}
    network = build({"class_path": NETWORK["class_path"], "init_args": parts})
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 7)
    # The default of the stem is known as well.
    assert (
        completed(stem={"class_path": "opteq.models.stems.ConvStem"})["body"]["init_args"]["channels"] == 32
    )


def test_numbers_that_are_given_stay_and_others_are_not_invented():
    head = {"class_path": "opteq.models.heads.Head", "init_args": {"channels": 5, "classes": 3}}
    parts = completed(
        body={"class_path": "torch.nn.Conv2d", "init_args": {"in_channels": 6, "out_channels": 5}}, head=head
    )
    assert parts["head"] == head
    assert parts["body"]["init_args"] == {"in_channels": 6, "out_channels": 5}
    alone = {"class_path": "torch.nn.Identity"}
    complete(alone, 1, 7)
    assert alone == {"class_path": "torch.nn.Identity"}


def test_a_body_of_maps_and_operators_is_built():
    operator = {"class_path": "opteq.Conv2d", "init_args": {"in_channels": 4, "out_channels": 8}}
    unit = {
        "class_path": "opteq.OptEqUnit",
        "init_args": {"W": operator, "U": operator, "activation": "tanh"},
    }
    layer = build(
        {
            "class_path": "opteq.EquilibriumLayer",
            "init_args": {
                "map": {"class_path": "opteq.DeepOptEq", "init_args": {"units": [unit, unit]}},
                "solver": {"class_path": "opteq.Picard", "init_args": {"tol": 1e-2}},
            },
        }
    )
    assert [type(u.activation).__name__ for u in layer.map.units] == ["Tanh", "Tanh"]
    assert layer.solver == opteq.Picard(tol=1e-2)
    assert layer.map.units[0].W is not layer.map.units[1].W
    pool = {"class_path": "opteq.AveragePool", "init_args": {"channels": 4, "factor": 2}}
    product = {"class_path": "opteq.models.bodies.Product", "init_args": {"operators": [pool, operator]}}
    halved, x = build(product), torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(halved(x), halved.operators[1](F.avg_pool2d(x, 2)))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's own, which leaves a trace when it is imported."""
    (tmp_path / "mine_of_parts.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'trace')!r}).touch()\n"
        "from torch import nn\nfrom opteq import Picard\n"
        "class Net(nn.Linear): pass\nclass Mine(Picard): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "trace"


def test_what_is_not_trusted_is_not_even_imported(mine):
    body = {
        "class_path": "opteq.models.bodies.Unit",
        "init_args": {"solver": {"class_path": "mine_of_parts.Mine"}},
    }
    for refuse in (build, check_trusted):
        with pytest.raises(
            ConfigError, match=r"mine_of_parts\.Mine.*opteq\.load\(RUN, trust=True\), or --trust true"
        ):
            refuse({**NETWORK, "init_args": {**NETWORK["init_args"], "body": body}})
    names = (
        {"model": {"network": {"init_args": {"similarity": "mine_of_parts.f"}}}},
        {"data": "mine_of_parts.f"},
        {"trainer": {"callbacks": ["mine_of_parts.f"]}},
    )
    for config in names:
        with pytest.raises(ConfigError, match=r"mine_of_parts\.f"):
            check_trusted(config)
    check_trusted(
        {"data": {"class_path": "opteq.data.digits.Digits", "init_args": {"classes": ["cat.lion"]}}}
    )
    assert not mine.exists()


def test_what_is_trusted_is_built_and_loaded(mine, tmp_path):
    spec = {"class_path": "mine_of_parts.Net", "init_args": {"in_features": 3, "out_features": 2}}
    network = build(spec, trust=True)
    save_network(tmp_path, network, ModelCard(spec, ("a", "b"), 1, 8, (0.0,), (1.0,)))
    x = torch.randn(4, 3)
    torch.testing.assert_close(load(tmp_path, trust=True)(x), network(x))
    with pytest.raises(ConfigError, match="trust=True"):
        opteq.load(tmp_path)


@pytest.mark.parametrize("class_path", ["os.system", "opteqx.Foo", "tests.Foo", "Foo", "", "torch.load"])
def test_foreign_classes_are_refused(class_path):
    with pytest.raises(ConfigError, match=r"only classes of opteq and torch\.nn are built"):
        build({"class_path": class_path, "init_args": {}})


@pytest.mark.parametrize(
    "class_path",
    [
        *(f"opteq.models.loading.{name}" for name in ("Path", "json", "load", "json.decoder.JSONDecoder")),
        "torch.nn.init.zeros_",
        "torch.nn.functional.relu",
        "torch.nn.modules.module.OrderedDict",
    ],
)
def test_what_a_module_holds_besides_its_own_classes_is_refused(class_path):
    with pytest.raises(ConfigError, match=f"{class_path} is not a class of opteq or a module"):
        build({"class_path": class_path})


def test_modules_of_torch_are_built():
    layer = build({"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}})
    assert type(layer) is nn.Linear


def test_options_of_a_dataclass_need_no_class_path():
    """As the parser of the command writes them."""
    coupling = {"weight": 0.02, "tau": 0.01, "heritage": False, "diversity": True}
    arguments = {"channels": 4, "hidden": [3, 3], "coupling": coupling}
    body = build({"class_path": "opteq.models.bodies.Coupled", "init_args": arguments})
    assert body.map.coupling == opteq.HeritageDiversity(0.02, 0.01, heritage=False)
    with pytest.raises(ConfigError, match="HeritageDiversity has no option 'wait'"):
        build({"class_path": "opteq.models.bodies.Coupled", "init_args": {"coupling": {"wait": 1}}})


@pytest.mark.parametrize("class_path", ["opteq.nowhere.Foo", "opteq.models.classifier.OptEqClassifier"])
def test_classes_of_another_version_are_named(class_path):
    with pytest.raises(ConfigError, match=f"This version of opteq has no {class_path}"):
        build({"class_path": class_path})
    with pytest.raises(ConfigError, match=r"There is no torch\.nn\.Foo"):
        build({"class_path": "torch.nn.Foo"})


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_of_parts.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_of_parts\.Net cannot be imported.*nowhere_to_be_found"):
        build({"class_path": "broken_of_parts.Net"}, trust=True)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"Could not build opteq\.models\.bodies\.Unit.*chanels"):
        build({"class_path": "opteq.models.bodies.Unit", "init_args": {"channels": 4, "chanels": 3}})
    with pytest.raises(TypeError, match="chanels"):
        Unit(4, chanels=3)
