import csv
import os

import numpy as np
import pytest
import torch
from PIL import Image

from opteq.errors import ConfigError, NonFiniteError, OpteqError
from opteq.models.bodies import Stack, Unit
from opteq.models.loading import ModelCard
from opteq.solvers.anderson import Anderson
from opteq.training.predict import default_output, predict_images, predict_to_file
from tests.networks import unit_classifier

CARD = ModelCard({}, ("cat", "dog"), 1, 8, (0.25,), (0.5,))


def make_network(**options):
    torch.manual_seed(0)
    return unit_classifier(in_channels=1, classes=2, **options).eval()


def predict(network, tmp_path):
    def refuse(reason):
        raise AssertionError(reason)

    return predict_images(network, CARD, tmp_path / "images", refuse)


@pytest.fixture
def images(tmp_path):
    """70 grey images, more than a batch, in two folders."""
    pixels = np.random.default_rng(0).integers(0, 256, (70, 8, 8), dtype=np.uint8)
    for i, image in enumerate(pixels):
        folder = tmp_path / "images" / str(i // 40)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:02}.png")
    return pixels


def test_agrees_with_the_network(images, tmp_path):
    network = make_network()
    predictions = predict(network, tmp_path)
    assert [prediction.path.name for prediction in predictions] == [f"{i:02}.png" for i in range(70)]
    with torch.no_grad():
        x = (torch.from_numpy(images)[:, None] / 255 - 0.25) / 0.5
        confidence, label = network(x).softmax(1).max(1)
        info = network.equilibrium_layers[0].solve(network.stem(x)).info
    assert [p.label for p in predictions] == [("cat", "dog")[i] for i in label]
    np.testing.assert_allclose([p.confidence for p in predictions], confidence, rtol=1e-4)
    np.testing.assert_allclose([p.residual for p in predictions], info.residual, rtol=0.05, atol=1e-7)
    assert all(p.converged for p in predictions)


def test_one_image(images, tmp_path):
    path = tmp_path / "images" / "0" / "03.png"
    (alone,) = predict_images(make_network(), CARD, path, print)
    among_others = predict(make_network(), tmp_path)[3]
    assert (alone.path, alone.label) == (path, among_others.label)
    assert alone.confidence == pytest.approx(among_others.confidence, rel=1e-4)


def test_unconverged_images_are_marked(images, tmp_path):
    network, hasty = make_network(), Anderson(tol=1e-5, max_steps=1)
    network.body = Stack([Unit(4, 4, solver=hasty), Unit(4, 4, solver=hasty)]).eval()
    predictions = predict(network, tmp_path)
    assert not any(p.converged for p in predictions)
    assert min(p.residual for p in predictions) > 1e-5


def test_without_equilibrium_layers(images, tmp_path):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    predictions = predict(network, tmp_path)
    assert all(p.converged and p.residual == 0 for p in predictions)


def test_the_table(images, tmp_path):
    predictions = predict(make_network(), tmp_path)
    told = predict_to_file(make_network(), CARD, tmp_path / "images", tmp_path / "out.csv")
    assert told == f"Wrote 70 predictions to {tmp_path}/out.csv."
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["path", "label", "confidence", "converged", "residual"]
    assert len(rows) == 70
    assert rows[3]["path"] == str(tmp_path / "images" / "0" / "03.png")
    assert float(rows[3]["confidence"]) == predictions[3].confidence


def test_few_predictions_are_told_one_by_one(images, tmp_path):
    few, output = tmp_path / "few", tmp_path / "out.csv"
    few.mkdir()
    files = sorted((tmp_path / "images").rglob("*.png"))
    for number in range(10):
        (few / f"{number}.png").write_bytes(files[number].read_bytes())
    told = predict_to_file(make_network(), CARD, few, output).splitlines()
    predictions = predict_images(make_network(), CARD, few)
    assert told[:-1] == [f"{p.path}: {p.label}, {p.confidence:.1%}" for p in predictions]
    assert told[-1] == f"Wrote 10 predictions to {output}."
    (few / "10.png").write_bytes(files[10].read_bytes())
    eleven = predict_to_file(make_network(), CARD, few, tmp_path / "more.csv")
    assert eleven == f"Wrote 11 predictions to {tmp_path}/more.csv."


@pytest.mark.parametrize("content", [b"no", b"", b"\x89PNG\r\n\x1a\n"])
def test_an_unreadable_image_is_skipped_and_named(images, tmp_path, content):
    everything = predict(make_network(), tmp_path)
    bad = tmp_path / "images" / "0" / "03.png"
    bad.write_bytes(content)
    (tmp_path / "images" / "folder.png").mkdir()  # named like an image
    reasons: list[str] = []
    predictions = predict_images(make_network(), CARD, tmp_path / "images", reasons.append)
    assert len(reasons) == 1
    assert f"Could not read the image {bad}" in reasons[0]
    assert "BufferedReader" not in reasons[0]
    assert [p.path for p in predictions] == [p.path for p in everything if p.path != bad]
    expected = [p.confidence for p in everything if p.path != bad]
    np.testing.assert_allclose([p.confidence for p in predictions], expected, rtol=1e-4)


def test_a_folder_without_a_readable_image_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.jpg").write_bytes(b"no")
    for images in (tmp_path / "images", tmp_path / "images" / "x.jpg"):
        with pytest.raises(ConfigError, match=r"Could not read the image .*x\.jpg"):
            predict_images(make_network(), CARD, images, print)
    (tmp_path / "images" / "y.jpg").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"None of the 2 images in .* could be read"):
        predict_images(make_network(), CARD, tmp_path / "images", print)


def labels_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


@pytest.mark.parametrize("end", [KeyboardInterrupt(), NonFiniteError("It broke.")])
def test_what_there_is_of_predictions_that_end_early_is_kept(images, tmp_path, monkeypatch, end):
    whole = {str(p.path): p.label for p in predict(make_network(), tmp_path)}
    network, output = make_network(), tmp_path / "out.csv"
    calls = iter([None, end])

    def interrupt(module, args):
        if error := next(calls):
            raise error

    network.register_forward_pre_hook(interrupt)
    with pytest.raises((KeyboardInterrupt, OpteqError)) as caught:
        predict_to_file(network, CARD, tmp_path / "images", output)
    assert f"Wrote 64 predictions to {output}; those of the other images are missing." in str(caught.value)
    assert labels_of(output) == dict(list(whole.items())[:64])


def test_a_file_that_is_there_is_not_replaced(images, tmp_path):
    output = tmp_path / "out.csv"
    output.write_text("mine")
    with pytest.raises(ConfigError, match=r"out\.csv is there already"):
        predict_to_file(make_network(), CARD, tmp_path / "images", output)
    assert output.read_text() == "mine"
    assert default_output(tmp_path) == tmp_path / "predictions.csv"
    (tmp_path / "predictions.csv").touch()
    (tmp_path / "predictions-2.csv").touch()
    assert default_output(tmp_path) == tmp_path / "predictions-3.csv"


def test_names_that_are_not_utf8_are_written_as_latin1(images, tmp_path):
    folder = tmp_path / "images" / "0"
    os.rename(os.fsencode(folder / "03.png"), os.fsencode(folder) + b"/z\xe9ro.png")
    (folder / "ü.png").write_bytes((folder / "04.png").read_bytes())
    told = predict_to_file(make_network(), CARD, tmp_path / "images", tmp_path / "out.csv")
    assert told.startswith("Wrote 71 predictions")
    labels = labels_of(tmp_path / "out.csv")
    assert labels[f"{folder}/ü.png"] == labels[f"{folder}/04.png"]
    assert f"{folder}/zéro.png" in labels


def test_files_of_other_kinds_are_listed(images, tmp_path):
    for name in ("a.heic", "b.heic", "c.txt", ".hidden"):
        (tmp_path / "images" / name).touch()
    told = predict_to_file(make_network(), CARD, tmp_path / "images", tmp_path / "out.csv")
    first, second = told.splitlines()
    assert first.startswith("Wrote 70 predictions")
    assert "Skipped: 3 of 73 files in" in second
    assert "(.heic, .txt)" in second
