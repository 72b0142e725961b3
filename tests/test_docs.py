import re
from itertools import groupby
from pathlib import Path

import pytest
import torch
from PIL import Image

import opteq
from opteq.configs import read_config
from opteq.data.images import read_image
from opteq.data.preprocess import Normalization, Preprocess
from opteq.models.loading import ModelCard, save_network
from opteq.models.parts import build, complete

ROOT = Path(__file__).parents[1]
PAGES = ["CONTRIBUTING.md", "docs/index.md", "docs/coming-from-torchdeq.md", "docs/rivals.md"]


def run_examples(page):
    """Run the blocks marked `python` of a page in turn and return the names they leave behind.

    Blocks in another library's terms are marked `py`.
    """
    names = {"__name__": "example"}
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in text.split("```python\n")[1:]:
        exec(compile(block.partition("```")[0], page, "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    torch.manual_seed(0)
    run_examples(page)


def test_the_output_in_the_readme(capsys):
    run_examples("README.md")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text.split("```text\n")[2].partition("```")[0]


def test_the_guide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run, photos = tmp_path / "runs" / "digits", tmp_path / "photos"
    run.mkdir(parents=True)
    photos.mkdir()
    network = read_config("digits")["model"]["network"]
    complete(network, in_channels=1, classes=10)
    card = ModelCard(network, tuple("0123456789"), 1, 8, (0.3,), (0.4,))
    save_network(run, build(network), card)
    pixels = torch.randint(256, (11, 19, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(photos / "three.png")

    names = run_examples("docs/guide.md")
    # A loop prints its line more than once; the last line names a prediction and is not stated.
    printed = [line for line, _ in groupby(capsys.readouterr().out.splitlines())]
    text = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    stated = re.findall(r"^ *print\(.+\)  # (.+)$", text, re.MULTILINE)
    assert printed[:-1] == stated
    # What one writes oneself reads an image as the command does, but for rounding to a grey level.
    pixels = read_image(photos / "three.png", 1, 8)
    expected, _ = Preprocess(Normalization(card.mean, card.std))((pixels[None], None))
    torch.testing.assert_close(names["batch"], expected, rtol=0, atol=1.01 / 255 / card.std[0])
    assert (names["radius"] > 0).all()


def test_the_configuration_in_the_guide(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    text = guide.split("```yaml\n")[1].partition("```")[0]
    (tmp_path / "my.yaml").write_text(text.replace("mine.", "mine_of_the_guide."))
    (tmp_path / "mine_of_the_guide.py").write_text("from opteq import Picard\nclass Halpern(Picard): pass\n")
    network = read_config(str(tmp_path / "my.yaml"))["model"]["network"]
    complete(network, in_channels=3, classes=10)
    network = build(network, trust=True)
    assert type(network.body.solver).__name__ == "Halpern"
    assert network(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_the_solver_of_the_recipe_finds_the_equilibrium():
    torch.manual_seed(0)
    solver = run_examples("CONTRIBUTING.md")["Halpern"]
    layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Dense(6, 8), opteq.Dense(4, 8)).double())
    x = torch.randn(3, 4, dtype=torch.float64)
    layer.solver = opteq.Anderson(tol=1e-12)
    expected = layer(x)
    layer.solver = solver(tol=1e-4, max_steps=100_000)
    solution = layer.solve(x)
    assert solution.info.converged.all()
    # A residual r of a map with contraction factor q leaves an error of at most r / (1 - q).
    q = layer.bind(x).contraction().value
    error = (solution.value - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error <= 1.01e-4 / (1 - q)).all()


def test_the_similarity_of_the_recipe_has_true_gradients():
    torch.manual_seed(0)
    recipe = run_examples("CONTRIBUTING.md")
    W = opteq.Dense(5, 3).double().bind((5,))
    c = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    y, v = torch.randn(2, 2, 5, dtype=torch.float64)
    y.requires_grad_()
    similarity = recipe["LogCoshSimilarity"](c, W)
    (gradient,) = torch.autograd.grad(similarity.value(y).sum(), y, create_graph=True)
    torch.testing.assert_close(similarity.gradient(y), gradient)
    linearization = similarity.linearize(y)
    torch.testing.assert_close(linearization.gradient(), gradient)
    (product,) = torch.autograd.grad(gradient, y, v, retain_graph=True)
    torch.testing.assert_close(linearization.product(v), product)
    pullback = torch.autograd.grad((v * gradient).sum(), similarity.tensors)
    torch.testing.assert_close(linearization.pullback(v), pullback)
    (weight,) = W.tensors
    dense = weight.mT @ weight
    assert (similarity.hessian_bound().value >= torch.linalg.matrix_norm(dense, 2)).all()


def test_the_map_of_the_recipe_is_solved_and_certified():
    torch.manual_seed(0)
    module = (
        run_examples("CONTRIBUTING.md")["LogCoshMap"](opteq.Dense(4, 6), opteq.Dense(3, 6)).double().eval()
    )
    layer = opteq.EquilibriumLayer(module, opteq.Anderson(tol=1e-12), opteq.Implicit(tol=1e-12))
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    z, (weight,) = layer(x), layer.bind(x).similarity.W.tensors
    assert z.any()
    hidden = torch.tanh(z @ weight.mT + module.injection(x))
    torch.testing.assert_close(z, (hidden @ weight).relu())
    unrolled, leaves = opteq.EquilibriumLayer(module, gradient=opteq.Unrolled(800)), [x, *module.parameters()]
    gradients = [torch.autograd.grad(value.square().sum(), leaves) for value in (z, unrolled(x))]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)
    certificate = opteq.certify(layer, x.detach())
    assert (certificate.distance.value >= certificate.distance_to_reference.value).all()
