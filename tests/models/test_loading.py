import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from opteq.errors import ConfigError, NonFiniteError
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


def spoiled(folder: Path, name: str, spoil) -> Path:
    """The file of weights in a folder, one of them changed."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: spoil(weights[name])}, file)
    return file


def one_of(value: float):
    def put(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.double()
        weight.view(-1)[-1] = value
        return weight

    return put


@pytest.mark.parametrize("name", ["body.map.W.weight", "stem.1.running_var"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_weights_that_are_not_finite_are_refused(run, name: str, value: float):
    """1e39 is too large for float32 alone."""
    file = spoiled(run, name, one_of(value))
    with pytest.raises(NonFiniteError) as caught:
        load(run)
    assert str(caught.value).startswith(
        f"{file} holds weights that are NaN or infinite in torch.float32, among them {name}, as"
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(run, dtype: torch.dtype):
    file = spoiled(run, "head.4.bias", lambda weight: weight.to(dtype))
    with pytest.raises(ConfigError) as caught:
        load(run)
    assert str(caught.value).startswith(
        f"{file} holds no weights for this network: head.4.bias is of {dtype} in place of torch.float32; save"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_taken(run, network, dtype: torch.dtype):
    spoiled(run, "body.map.W.weight", lambda weight: weight.to(dtype))
    expected = network.body.map.W.weight.detach().to(dtype).float()
    assert torch.equal(load(run).body.map.W.weight, expected)


class Masked(nn.Linear):
    """With a mask as attention has it, and a layer that is used twice."""

    def __init__(self):
        super().__init__(2, 2)
        self.again = self.first = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([[0.0, -math.inf], [0.0, 0.0]]))


def test_a_network_keeps_its_own_infinities_and_shared_parts(tmp_path):
    card = ModelCard({"class_path": f"{__name__}.Masked"}, ("a", "b"), 1, 8, (0.5,), (0.5,))
    network = Masked()
    save_network(tmp_path, network, card)
    loaded = load(tmp_path, trust=True)
    assert torch.equal(loaded.mask, network.mask)
    assert loaded.again is loaded.first
    assert torch.equal(loaded.first.weight, network.first.weight)
    for value in (math.inf, math.nan):
        spoiled(tmp_path, "mask", lambda mask, value=value: torch.full_like(mask, value))
        with pytest.raises(NonFiniteError, match="among them mask"):
            load(tmp_path, trust=True)
