import json
from pathlib import Path

import pytest
import torch

from opteq.errors import ConfigError
from opteq.models.loading import ModelCard, load, save_network
from opteq.models.parts import build

SOLVER = {"class_path": "opteq.solvers.picard.Picard", "init_args": {"tol": 1e-5, "max_steps": 70}}
BODY = {"channels": 4, "hidden": 4, "solver": SOLVER, "gradient": {"class_path": "opteq.OneStep"}}
SPEC = {
    "class_path": "opteq.models.classifier.ImageClassifier",
    "init_args": {
        "stem": {"class_path": "opteq.models.stems.ConvStem", "init_args": {"in_channels": 1, "channels": 4}},
        "body": {"class_path": "opteq.models.bodies.Unit", "init_args": BODY},
        "head": {"class_path": "opteq.models.heads.Head", "init_args": {"channels": 4, "classes": 3}},
    },
}
CARD = ModelCard(SPEC, ("a", "b", "c"), 1, 8, (0.3,), (0.4,))


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = build(SPEC)
    # Statistics of the norms other than those of a new network.
    network(torch.randn(8, 1, 8, 8))
    return network


@pytest.fixture
def run(tmp_path, network):
    save_network(tmp_path, network, CARD)
    return tmp_path


def test_loads_the_network_in_eval_mode(run, network):
    loaded = load(run)
    x = torch.randn(5, 1, 8, 8)
    assert not loaded.training
    torch.testing.assert_close(loaded(x), network.eval()(x), rtol=0, atol=0)
    assert loaded.equilibrium_layers[0].solver.max_steps == 70
    assert type(loaded.equilibrium_layers[0].gradient).__name__ == "OneStep"


def test_opteq_load_is_public(run):
    import opteq

    assert type(opteq.load(str(run)).body).__name__ == "Unit"


def test_card_round_trip(run):
    card = ModelCard.read(run)
    assert card.network == SPEC
    assert list(card.class_names) == ["a", "b", "c"]
    assert (card.in_channels, card.image_size, list(card.mean), list(card.std)) == (1, 8, [0.3], [0.4])


def test_shared_weights_are_saved(tmp_path, network):
    norm = network.stem[1]
    norm.weight = norm.bias
    save_network(tmp_path, network, CARD)
    assert load(tmp_path).stem[1].weight.tolist() == norm.bias.tolist()


def test_unknown_arguments(run):
    card = json.loads((run / "model.json").read_text())
    card["network"]["init_args"]["body"]["init_args"]["chanels"] = 3
    (run / "model.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="chanels"):
        load(run)


def test_a_solver_is_not_a_network(run):
    card = json.loads((run / "model.json").read_text())
    card["network"] = SOLVER
    (run / "model.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="does not describe a network"):
        load(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"network": {}}'])
def test_damaged_card(run, text):
    (run / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.json is damaged"):
        load(run)


@pytest.mark.parametrize(
    ("name", "value"),
    [("class_names", []), ("image_size", []), ("image_size", [8]), ("image_size", [8, 8, 8])],
)
def test_a_card_without_classes_or_sides_is_damaged(run, name: str, value: list):
    card = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(card | {name: value}))
    with pytest.raises(ConfigError, match=rf"model\.json is damaged \({name} is"):
        load(run)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_weights(run, kept):
    path: Path = run / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, truncated"):
        load(run)


def test_weights_of_another_model(run):
    card = json.loads((run / "model.json").read_text())
    card["network"]["init_args"]["head"]["init_args"]["classes"] = 8
    (run / "model.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="of another model"):
        load(run)


def test_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match="no trained model"):
        load(tmp_path / "nowhere")
