"""Networks on the hub: local folders, and a hub whose calls are answered by folders."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import opteq
from opteq.errors import ConfigError, NonFiniteError
from opteq.models.loading import ModelCard

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

from huggingface_hub import hub_mixin

from opteq import hub
from opteq.hub import HubModel

NUMBERS = {"model": "OptEqUnit", "test_accuracy": 0.997, "unconverged": 0, "test_classes": {"0": {}}}


@pytest.fixture
def model():
    return HubModel(opteq.load("digits"), ModelCard.read("digits"), NUMBERS)


@pytest.fixture
def images():
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_is_saved_is_loaded_again(model, images, tmp_path):
    model.save_pretrained(tmp_path / "digits")
    again = HubModel.from_pretrained(tmp_path / "digits")
    torch.testing.assert_close(again(images), opteq.load("digits")(images), rtol=0, atol=0)
    assert not again.training
    assert (again.card, again.measured) == (model.card, NUMBERS)


def test_the_folder_is_a_run_and_holds_no_pickle(model, images, tmp_path):
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(opteq.load(tmp_path)(images), model(images), rtol=0, atol=0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "model.json", "config.json", "README.md"}


def test_the_readme_has_the_measured_numbers_and_the_normalisation(model, tmp_path):
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| test_accuracy | 0.997 |" in text
    assert "test_classes" not in text
    assert "library_name: opteq" in text
    assert f"(batch, 1, 8, 8), scaled to [0, 1], less [{model.card.mean[0]:.3f}]" in text


def test_a_run_gives_its_own_numbers(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"test_accuracy": 0.5}))
    assert HubModel.from_run(tmp_path).measured == {"test_accuracy": 0.5}
    assert HubModel.from_run("digits").measured == {}


def test_it_goes_to_the_hub_and_comes_back(model, images, tmp_path, monkeypatch):
    there = tmp_path / "there"

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **_):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, folder_path, **_):
            folder_path.rename(there)
            return "https://example.org/commit"

    def download(repo_id, allow_patterns, **_):
        assert repo_id == "someone/digits"
        assert set(allow_patterns) == {"model.json", "model.safetensors"}
        return str(there)

    monkeypatch.setattr(hub_mixin, "HfApi", Api)
    monkeypatch.setattr(hub_mixin, "hf_hub_download", lambda **_: there / "config.json")
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert model.push_to_hub("someone/digits") == "https://example.org/commit"
    again = HubModel.from_pretrained("someone/digits")
    torch.testing.assert_close(again(images), model(images), rtol=0, atol=0)
    assert again.measured == NUMBERS


class Foreign(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :2]


@pytest.fixture
def foreign(tmp_path):
    card = ModelCard({"class_path": f"{__name__}.Foreign"}, ("a", "b"), 1, 8, (0.5,), (0.5,))
    HubModel(Foreign(), card).save_pretrained(tmp_path)
    return tmp_path


def test_foreign_classes_are_built_only_when_trusted(foreign):
    with pytest.raises(ConfigError, match="unless you trust"):
        HubModel.from_pretrained(foreign)
    assert isinstance(HubModel.from_pretrained(foreign, trust=True).network, Foreign)


def test_a_folder_without_a_model_is_said(tmp_path):
    with pytest.raises(ConfigError, match="holds no trained model"):
        HubModel.from_pretrained(tmp_path)


def test_a_network_without_its_card_is_refused():
    with pytest.raises(ConfigError, match="card"):
        HubModel(nn.Flatten(), {"class_names": []})


def test_weights_that_are_not_finite_are_refused(model, tmp_path):
    model.network.head[-1].bias.data[3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(NonFiniteError, match=rf"{tmp_path}/model\.safetensors holds weights that are NaN"):
        HubModel.from_pretrained(tmp_path)
