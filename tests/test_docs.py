import pkgutil
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
from opteq.errors import ConfigError
from opteq.models.loading import ModelCard, save_network
from opteq.models.parts import build, complete

ROOT = Path(__file__).parents[1]
TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))
PAGES = [
    "CONTRIBUTING.md",
    "docs/index.md",
    "docs/coming-from-mdeq.md",
    "docs/coming-from-torchdeq.md",
    "docs/guide.md",
    "docs/rivals.md",
]
# mkdocs looks at the links of the pages of the site.
OUTSIDE = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/DIARY.md"]


def run_examples(page):
    """Run the blocks marked `python` of a page in turn and return the names they leave behind.

    Blocks in another library's terms are marked `py`.
    """
    names = {"__name__": "example"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
    return names


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block.partition("```")[0] for block in text.split("```python\n")[1:]]


def check_what_is_printed(page, printed):
    """What a page states behind its calls of `print` is what they print."""
    text = (ROOT / page).read_text(encoding="utf-8")
    stated = re.findall(r"^ *print\(.+\)  # (.+)$", text, re.MULTILINE)
    # A loop prints its line more than once.
    printed, stated = ([line for line, _ in groupby(lines)] for lines in (printed.splitlines(), stated))
    assert printed[: len(stated)] == stated


@pytest.mark.parametrize("page", [*PAGES, *TASKS], ids=lambda page: Path(page).stem)
def test_examples_run_and_print_what_the_page_says(page, capsys):
    torch.manual_seed(0)
    run_examples(page)
    check_what_is_printed(page, capsys.readouterr().out)


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_a_task_takes_thirty_lines(page):
    lines = [line for block in blocks(page) for line in block.splitlines() if line.strip()]
    assert 0 < len(lines) <= 30
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("page", OUTSIDE)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    missing = [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()]
    assert targets
    assert not missing


def test_the_table_from_theory_to_code_is_whole_and_true():
    theory, table = (
        (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("theory", "theory-to-code")
    )
    rows = re.findall(r"^### (R\d\.\d) (.+)$", theory, re.MULTILINE)
    assert re.findall(r"^\| \[(R\d\.\d)\]\S+ (.+?) \|", table, re.MULTILINE) == rows
    for path in re.findall(r"`(opteq(?:\.\w+)+)`", table):
        pkgutil.resolve_name(path)
    code = re.findall(r"`([A-Z]\w+)\b[^`]*`", table)
    assert code
    assert not {name for name in code if not hasattr(opteq, name)} - {"ImageClassifier"}


def test_the_output_in_the_readme(capsys):
    run_examples("README.md")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text.split("```text\n")[2].partition("```")[0]


def test_the_page_on_trained_models(tmp_path, monkeypatch, capsys):
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

    names = run_examples("docs/training.md")
    check_what_is_printed("docs/training.md", capsys.readouterr().out)
    # What one writes oneself reads an image as the command does, but for rounding to a grey level.
    pixels = read_image(photos / "three.png", 1, 8)
    expected, _ = Preprocess(Normalization(card.mean, card.std))((pixels[None], None))
    torch.testing.assert_close(names["batch"], expected, rtol=0, atol=1.01 / 255 / card.std[0])


def test_the_recipe_is_built_with_the_solver_of_its_page(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = (ROOT / "docs/tasks/recipe.md").read_text(encoding="utf-8")
    text = text.split("```yaml\n")[1].partition("```")[0]
    (tmp_path / "my.yaml").write_text(text.replace("mine.", "mine_of_the_pages."))
    (tmp_path / "mine_of_the_pages.py").write_text(blocks("docs/tasks/solver.md")[0])
    network = read_config(str(tmp_path / "my.yaml"))["model"]["network"]
    complete(network, in_channels=3, classes=10)
    network = build(network, trust=True)
    assert type(network.body.solver).__name__ == "Halpern"
    assert network(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_the_body_of_its_page_is_built_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_network.py").write_text(blocks("docs/tasks/network.md")[0])
    network = read_config("cifar10-small")["model"]["network"]
    network["init_args"]["body"] = {"class_path": "mine_network.SkipUnit", "init_args": {"hidden": 64}}
    complete(network, in_channels=3, classes=10)
    network = build(network, trust=True)
    assert type(network.body).__name__ == "SkipUnit"
    assert network(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_the_layer_of_its_page_is_solved_and_certified():
    torch.manual_seed(0)
    layer = opteq.EquilibriumLayer(
        run_examples("docs/tasks/layer.md")["TanhMap"](4, 6), opteq.Anderson(tol=1e-5)
    )
    x = torch.randn(8, 4)
    z, (weight,) = layer(x), layer.bind(x).W.tensors
    torch.testing.assert_close(z, torch.tanh(z @ weight.mT + layer.map.U(x)), rtol=1e-4, atol=1e-5)
    certificate = opteq.certify(layer, x)
    assert certificate.distance.kind == "bound"
    assert (certificate.distance.value >= certificate.distance_to_reference.value).all()
    assert (certificate.contraction.value <= 0.9 * (1 + 1e-6)).all()


def test_the_operator_of_its_page_is_a_circular_convolution_with_a_sharp_bound():
    torch.manual_seed(0)
    names = run_examples("docs/tasks/operator.md")
    operator = names["Circular"](2).double()
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (2, 0, 2, 0), mode="circular")
    kernel = operator.weight.flip(1, 2).unsqueeze(1)  # a convolution, where torch has a correlation
    torch.testing.assert_close(operator(x), torch.nn.functional.conv2d(padded, kernel, groups=2))
    report = names["report"]
    assert report.norm <= report.quick_bound <= report.norm * (1 + 1e-6)
    # Its page shows what is said if the conjugate is forgotten.
    wrong = blocks("docs/tasks/operator.md")[0].replace(".conj() * rfft2(y), self", " * rfft2(y), self")
    with pytest.raises(ConfigError) as error:
        exec(compile(wrong, "wrong", "exec"), {"__name__": "example"})
    page = (ROOT / "docs/tasks/operator.md").read_text(encoding="utf-8")
    stated = page.partition("> ")[2].partition("\n")[0].replace("`", "")
    number = r"\d\.\de[-+]\d\d"
    assert re.sub(number, "#", str(error.value).replace("`", "")) == re.sub(number, "#", stated)


def test_the_regulariser_of_its_page_has_true_derivatives():
    torch.manual_seed(0)
    roughness = run_examples("docs/tasks/objective.md")["Roughness"]()
    z = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(roughness.value(z).sum(), z)
    torch.testing.assert_close(roughness.gradient(z), gradient)
    one = torch.zeros(1, 1, 6, 7, dtype=torch.float64)
    hessian = torch.func.jacrev(roughness.gradient)(one).reshape(42, 42)
    values = torch.linalg.eigvalsh(hessian)
    low, high = roughness.curvature
    assert low - 1e-12 <= values[0]
    assert values[-1] <= high


def test_the_solver_of_its_page_finds_the_equilibrium():
    torch.manual_seed(0)
    solver = run_examples("docs/tasks/solver.md")["Halpern"]
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


def test_options_in_the_text_are_not_broken_behind_their_dashes(browser):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.set_content(
        "<style>code { overflow-wrap: anywhere }</style><p style='width: 300px; font: 16px monospace'>"
        "On the command line it is <code>--model.network.body.readout hidden</code>, and in Python"
        " <code>opteq.theory.lipschitz.equilibrium_lipschitz</code>.</p><pre><code>--of a block</code></pre>"
    )
    page.add_script_tag(path=ROOT / "docs" / "assets" / "code.js")
    option, name = page.locator("p code").all()
    assert option.inner_text() == "--model.network.body.readout hidden"
    assert option.evaluate("e => e.firstElementChild.getClientRects().length") == 1
    assert name.inner_text() == "opteq.theory.lipschitz.equilibrium_lipschitz"
    lines = name.evaluate(
        """e => [...e.childNodes].filter(n => n.nodeType === Node.TEXT_NODE).map(n => {
            const range = document.createRange();
            range.selectNode(n);
            return range.getClientRects().length; })"""
    )
    assert lines == [1] * 4
    assert page.locator("pre span").count() == 0
    page.close()
