"""Packaged configurations: what they inherit, and that their shapes fit their images."""

import pytest
import torch

from opteq.configs import presets, read_config, with_base
from opteq.errors import ConfigError
from opteq.models.bodies import Coupled
from tests.networks import preset_network

BASE = {"model": {"network": {"class_path": "a.B", "init_args": {"x": 1, "y": [1, 2]}}, "rate": 0.1}}


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        "model: {network: {class_path: a.B, init_args: {x: 1, y: [1, 2]}}, rate: 0.1}\n"
    )
    return "base.yaml"


def test_options_are_laid_over_those_of_the_base(base):
    own = {"base": base, "model": {"network": {"init_args": {"y": [3], "z": {}}}}, "data": None}
    assert with_base(own) == {
        "model": {"network": {"class_path": "a.B", "init_args": {"x": 1, "y": [3], "z": {}}}, "rate": 0.1},
        "data": None,
    }
    assert own["base"] == base
    assert with_base(BASE) == read_config(base) == BASE


def test_another_class_starts_with_none_of_the_arguments(base):
    own = {"base": base, "model": {"network": {"class_path": "a.C", "init_args": {"z": 2}}}}
    network = with_base(own)["model"]["network"]
    assert network == {"class_path": "a.C", "init_args": {"z": 2}}


def test_a_base_may_have_a_base_but_not_itself(base, tmp_path):
    (tmp_path / "middle.yaml").write_text("base: base.yaml\nmodel: {rate: 0.2}\n")
    (tmp_path / "top.yaml").write_text("base: middle.yaml\nmodel: {seed: 3}\n")
    assert read_config("top.yaml") == {"model": {**BASE["model"], "rate": 0.2, "seed": 3}}
    (tmp_path / "middle.yaml").write_text("base: top.yaml\n")
    with pytest.raises(ConfigError, match="is its own base; name another one"):
        read_config("top.yaml")
    with pytest.raises(ConfigError, match="cifar10-smal is neither a preset nor a file; did you mean"):
        with_base({"base": "cifar10-smal"})


def branches(config):
    body = config["model"]["network"]["init_args"]["body"].get("init_args", {})
    return body.get("reductions"), body.get("patch_size", 2 if "Gaussian" in str(config) else 1)


@pytest.mark.spec("R5.5", "R5.6", "R6.6")
@pytest.mark.parametrize("name", [p.name for p in presets() if branches(read_config(p.name))[0]])
def test_branches_fit_the_images_and_have_one_equilibrium(name):
    config = read_config(name)
    reductions, patch = branches(config)
    stem = config["model"]["network"]["init_args"]["stem"]["init_args"]
    size = config["data"]["init_args"].get("image_size", 32) >> stem.get("downsamplings", 0)
    assert all(size % (reduction * patch) == 0 for reduction in reductions)
    with torch.device("meta"):
        body = preset_network(name).body
    if isinstance(body, Coupled):
        assert body.map.uniqueness_checked
