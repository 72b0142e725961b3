"""Networks whose weights come with the package."""

from pathlib import Path

import pytest
import torch

import opteq
from opteq import models
from opteq.configs import presets
from opteq.data.digits import Digits
from opteq.errors import ConfigError
from opteq.models.classifier import ImageClassifier
from opteq.models.loading import ModelCard, pretrained, save_network


@pytest.mark.parametrize("name", pretrained())
def test_every_pretrained_network_is_that_of_its_preset(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network, card = opteq.load(name), ModelCard.read(name)
    assert isinstance(network, ImageClassifier)
    assert not network.training
    (preset,) = [p for p in presets() if p.name == name]
    assert sum(p.numel() for p in network.parameters()) == preset.parameters
    size = card.image_size if isinstance(card.image_size, tuple) else (card.image_size, card.image_size)
    with torch.no_grad(), opteq.solve_log(network) as log:
        logits = network(torch.rand(2, card.in_channels, *size))
    assert logits.shape[:2] == (2, len(card.class_names))
    assert log.forward.unconverged == 0
    folder = Path(models.__file__).parent / "pretrained" / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1e6


def test_the_digits_are_told_apart():
    network, data = opteq.load("digits"), Digits()
    data.setup("test")
    with torch.no_grad():
        hits = [(network(images).argmax(1) == labels) for images, labels in data.test_dataloader()]
    assert torch.cat(hits).float().mean() > 0.99


def test_a_folder_of_ones_own_comes_first(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = ModelCard({"class_path": "torch.nn.Flatten", "init_args": {}}, ("a", "b"), 1, 8, (0.0,), (1.0,))
    (tmp_path / "digits").mkdir()
    save_network(tmp_path / "digits", torch.nn.Flatten(), card)
    assert isinstance(opteq.load("digits"), torch.nn.Flatten)


def test_an_unknown_name_gets_those_that_there_are(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"dance holds no trained model .* pretrained network: .*digits"):
        opteq.load("dance")
    with pytest.raises(ConfigError, match=r"digts holds no trained model .*; did you mean digits\?"):
        opteq.load("digts")
    with pytest.raises(ConfigError, match="holds no trained model"):
        opteq.load("pretrained/digits")
