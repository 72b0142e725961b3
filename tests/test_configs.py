"""Packaged configurations: what they inherit, and that their shapes fit their images."""

import pytest
import torch

from opteq.configs import presets, read_config, with_base
from opteq.errors import ConfigError
from opteq.models.baselines.ode import NeuralODE
from opteq.models.bodies import Coupled
from tests.networks import count, preset_network

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
        assert body.map.kept_unique


# What the rivals' own code comes to, or what the papers print where no code is public.
RIVALS = {
    "cifar10-neural-ode": 172_358,
    "cifar10-augmented-ode": 171_799,
    "cifar10-monotone-172k": 172_218,
    "cifar10-monotone-854k": 853_612,
    "cifar10-monotone-1m": 1_014_546,
    "cifar10-resnet18": 11_170_000,
    "cifar10-resnet50": 23_520_000,
    "cifar10-mdeq-175k": 175_418,
    "cifar10-mdeq-2.5m": 2_530_000,
    "cifar10-mdeq-10m": 11_098_398,
    # As many as the model that it is compared with.
    "cityscapes-fcn-14m": 13_870_099,
}
SMALL_RIVALS = ("dnn", "residual", "deq", "monotone", "mdeq", "ode", "augmented-ode")


@pytest.mark.spec("R7.8", "R2.8")
@pytest.mark.parametrize(("name", "parameters"), RIVALS.items(), ids=RIVALS)
def test_rivals_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        assert count(preset_network(name)) == pytest.approx(parameters, rel=0.01)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize("name", SMALL_RIVALS)
def test_small_rivals_have_the_size_of_the_unit_and_its_stem(name):
    with torch.device("meta"):
        unit, rival = preset_network("cifar10-small"), preset_network(f"cifar10-small-{name}")
    assert count(rival) == pytest.approx(count(unit), rel=0.02)
    assert str(rival.stem) == str(unit.stem)


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize(
    "name",
    # The large ones have the same parts.
    [
        *(name for name, parameters in RIVALS.items() if parameters < 200_000),
        *(f"cifar10-small-{name}" for name in SMALL_RIVALS),
    ],
)
def test_rivals_take_a_training_step(name):
    torch.manual_seed(0)
    network, x = preset_network(name), torch.randn(2, 3, 32, 32)
    if isinstance(network.body, NeuralODE):
        pytest.importorskip("torchdiffeq")
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    logits = network(x)
    torch.nn.functional.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long)).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in network.parameters())
    optimizer.step()
    assert all(p.isfinite().all() for p in network.parameters())
