"""Exported networks, run by onnxruntime and by torch.export, against the equilibria in double precision."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import opteq
from opteq import native
from opteq.cli import main
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError
from opteq.models.bodies import Coupled, Deep, Gaussian, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.loading import ModelCard
from opteq.models.stems import ConvStem
from opteq.operators.norms.orthogonal import Orthogonal
from opteq.training.export import check_pixels, export

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

BODIES = {
    "unit": (1, lambda: Unit(4, 6, max_norm=0.8)),
    "orthogonal": (1, lambda: Unit(4, 6, max_norm=0.8, norm=Orthogonal())),
    "deep": (1, lambda: Deep(4, [6, 5], alpha=0.7, max_norm=0.8)),
    "branches": (2, lambda: Coupled(4, [6, 5], reductions=[1, 2], max_norm=0.7)),
    "kernel": (1, lambda: Gaussian(4, 8, patch_channels=4, patch_hidden=8, max_norm=0.8)),
}


OF_ITS_IMAGES = Normalization((0.4,), (0.3,))
CARD = ModelCard({}, tuple("abc"), 1, 8, *OF_ITS_IMAGES)


def exact(network, pixels):
    """The logits of equilibria that are solved for by the plain iteration, in double precision."""
    network = copy.deepcopy(network).double()
    for layer in network.equilibrium_layers:
        layer.solver = opteq.Picard(tol=1e-10, max_steps=1000)
    with torch.no_grad():
        return network((pixels.double() - 0.4) / 0.3).float()


def run(path, pixels):
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        return torch.from_numpy(session.run(["logits"], {"pixels": pixels.numpy()})[0])
    with torch.no_grad():
        return torch.export.load(path).module()(pixels)


# An ONNX file is made from the program that is the other format.
@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "onnx") for name in BODIES if name != "kernel"), ("unit", "torch"), ("kernel", "torch")],
)
def test_what_is_exported_gives_the_equilibria_for_batches_of_any_size(tmp_path, name, format):
    torch.manual_seed(0)
    branches, body = BODIES[name]
    network = ImageClassifier(ConvStem(1, 4), body(), Head(4, 3, branches)).eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    pixels, path = torch.rand(7, 1, 8, 8), tmp_path / f"model.{'onnx' if format == 'onnx' else 'pt2'}"
    made = export(network, pixels, path, format, tol=1e-4, normalization=OF_ITS_IMAGES)
    expected = exact(network, pixels)
    error = float((run(path, pixels) - expected).abs().max() / expected.abs().max())
    assert error == pytest.approx(made.error, rel=0.01, abs=1e-6)
    assert error < 1.1e-4
    torch.testing.assert_close(run(path, pixels[:3]), run(path, pixels)[:3], rtol=1e-5, atol=1e-6)
    assert made.megabytes == path.stat().st_size / 1e6
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert all(type(layer.gradient) is opteq.Implicit for layer in network.equilibrium_layers)


def test_the_digits_in_onnx_are_those_of_the_layer_on_a_hundred_images(tmp_path, capsys):
    path = tmp_path / "digits.onnx"
    assert main(["export", "digits", "--output", str(path)]) == 0
    said, told = capsys.readouterr()
    assert f"Wrote {path}, " in said
    assert told.startswith(
        "Exporting digits: solving for its equilibria on 100 images, then looking how many iterations come"
        " within 0.001 …\n"
    )
    assert "On 100 images of noise its logits are within" in said
    images = load_digits().images[-100:].astype(np.float32) / 16
    pixels = torch.from_numpy(images)[:, None]
    network, facts = opteq.load("digits"), ModelCard.read("digits")
    with torch.no_grad():
        expected = network((pixels - torch.tensor(facts.mean)) / torch.tensor(facts.std))
    found = run(path, pixels)
    # Both are as far from the equilibrium as their tolerances, of 1e-3, allow.
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-3 * float(expected.abs().max()))
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_nothing_is_overwritten_and_what_cannot_be_reached_is_said(tmp_path):
    torch.manual_seed(0)
    slow = Unit(4, 6, max_norm=0.9999, norm=Orthogonal())
    network = ImageClassifier(ConvStem(1, 4), slow, Head(4, 3)).eval()
    pixels, path = torch.rand(2, 1, 8, 8), tmp_path / "model.pt2"
    said = r"After 320 iterations the logits are still .*, more than 1e-12; give a larger --tol, .* --steps\."
    with pytest.raises(ConfigError, match=said) as refused:
        export(network, pixels, path, "torch", tol=1e-12, normalization=OF_ITS_IMAGES)
    # The solver of the network itself stops further away than that, as far as is said.
    double = copy.deepcopy(network).double()
    double.equilibrium_layers[0].solver = opteq.Anderson(tol=1e-10, max_steps=5000)
    with torch.no_grad():
        own, expected = network((pixels - 0.4) / 0.3), double((pixels.double() - 0.4) / 0.3).float()
    error = float((own - expected).abs().max() / expected.abs().max())
    limit = "The network's own solver, which stops at a relative residual of 0.001, leaves the logits"
    assert str(refused.value).endswith(f" {limit} {error:.1e} from there.")
    # Where it is closer, it is not what keeps the export from it.
    network.equilibrium_layers[0].solver = opteq.Anderson(tol=1e-5, max_steps=2000)
    with pytest.raises(ConfigError, match=r"with --steps\.$"):
        export(network, pixels, path, "torch", tol=0.5)
    with pytest.raises(ConfigError, match="`steps` to be a whole number of at least 1"):
        export(network, pixels, path, "torch", steps=0)
    with pytest.raises(ConfigError, match="`format` to be one of onnx, torch"):
        export(network, pixels, path, "tflite")
    assert not path.exists()
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="is there already; remove it or choose another --output"):
        export(network, pixels, path, "torch")
    assert path.read_bytes() == b"mine"


def test_what_onnx_has_no_operation_for_is_refused(tmp_path):
    _, kernel = BODIES["kernel"]
    network = ImageClassifier(ConvStem(1, 4), kernel(), Head(4, 3)).eval()
    with pytest.raises(ConfigError, match=r"ONNX has no operation for .*svd.*; give it the format torch"):
        export(network, torch.rand(2, 1, 8, 8), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_number_of_iterations_may_be_given(tmp_path):
    torch.manual_seed(0)
    network = ImageClassifier(ConvStem(1, 4), Unit(4, 6, max_norm=0.8), Head(4, 3)).eval()
    pixels, path = torch.rand(2, 1, 8, 8), tmp_path / "model.pt2"
    made = export(network, pixels, str(path), "torch", steps=1)
    layer = network.equilibrium_layers[0]
    with torch.no_grad():
        c = network.stem(pixels)
        once = layer.map.bind(c)(torch.zeros_like(layer(c)))
        torch.testing.assert_close(run(path, pixels), network.head(once), rtol=1e-5, atol=1e-6)
    assert made.steps == 1


def test_images_to_check_with_that_cannot_be_read_are_skipped(tmp_path):
    levels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(levels).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    (tmp_path / "c.svg").touch()
    told = []
    pixels = check_pixels(CARD, tmp_path, told.append)
    np.testing.assert_allclose(pixels.numpy(), levels[None, None] / 255, rtol=1e-6)
    assert "1 of 3 files in" in told[0]
    assert "b.png" in told[1]
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match=r"None of the images in .* could be read"):
        check_pixels(CARD, tmp_path, told.append)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    network = ImageClassifier(ConvStem(1, 4), Unit(4, 6, max_norm=0.8), Head(4, 3)).eval()
    with pytest.raises(ConfigError, match=r"needs the package onnxscript: pip install 'opteq\[export\]'"):
        export(network, torch.rand(2, 1, 8, 8), tmp_path / "model.onnx")


def test_info_says_what_is_installed(capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert f"torch           {torch.__version__.partition('+')[0]}" in said
    assert "opteq-native    " in said
    assert f"compiled code   {native.status().account}" in said
