import copy
import io
import json
import re
from html import escape
from html.parser import HTMLParser
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opteq.evaluation.record as records
import opteq.evaluation.report as report
from opteq.errors import ConfigError
from opteq.evaluation.page import _CSS, facts, folded, image, missing, page, section, table, tiles
from opteq.evaluation.report import write_report
from opteq.evaluation.scores import accuracy_interval
from opteq.evaluation.sections import headline
from opteq.layer import EquilibriumLayer
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqUnit
from opteq.models.bodies import Gaussian, Unit
from opteq.operators.conv import Conv2d
from opteq.plots.style import _VARIABLES, new_figure
from opteq.solvers.anderson import Anderson
from tests.conftest import PATIENCE
from tests.evaluation.conftest import new_data, new_network
from tests.networks import branch_classifier

SUMMARY = {
    "dataset": "<i>set</i>",
    "model": "OptEq & friends",
    "parameters": 12345,
    "test_accuracy": 0.9876,
    "solver_steps_mean": 7.25,
    "residual_max": 9.1e-05,
    "unconverged": 3,
    "seconds_train": 725.2,
    "images_per_second": 3120.4,
    "peak_memory_mb": 512.3,
}
VERSIONS = {"command": "opteq fit --config 'my <set>'", "date": "2026-01-02 03:04+01:00", "python": "3.11.0"}
METRICS = "epoch,step,train_loss,val_loss,val_accuracy\n0,9,2.0,,\n0,9,,1.5,\n1,19,1.0,1.2,\n"


class Page(HTMLParser):
    """The tags of a page, the addresses they point to, and its text (from the body on)."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        names = ("src", "srcset", "href", "data", "action")
        self.addresses += [value for name, value in attrs if name in names]

    def handle_data(self, data):
        if self.tags[-1:] != ["style"]:
            self.text += data


def new_run(path):
    folder = path / "a&b"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "metrics.csv").write_text(METRICS)
    (folder / "config.yaml").write_text("note: <script>alert(1)</script>\n")
    return folder


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures stay empty where a test is about the words: to draw them takes nine tenths of the time."""
    monkeypatch.setattr("opteq.evaluation.page.to_element", lambda figure: "<svg></svg>")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report, written once for all that only look at it, its folder, its network and its data."""
    run, network = new_run(tmp_path_factory.mktemp("report")), new_network()
    data = new_data(network)
    path = write_report(run, network, data)
    return SimpleNamespace(run=run, path=path, page=Page(path), network=network, data=data)


def test_the_page_is_self_contained_escaped_and_complete(written):
    path, shown = written.path, written.page
    assert path == written.run / "report.html"

    assert shown.addresses == []
    assert shown.tags.count("svg") - 1 == shown.tags.count("figcaption") == 11
    source = re.sub(r"base64,[\s\w+/=]+", "", path.read_text(encoding="utf-8"))
    # What pictures refer to is in the page.
    named = set(re.findall(r' id="([^"]+)"', source))
    assert set(re.findall(r"url\(([^)]*)\)", source)) <= {f"#{name}" for name in named}
    assert set(re.findall(r'href="([^"]*)"', source)) - {"data:image/png;"} <= {f"#{name}" for name in named}
    assert "http:" not in source
    assert "https:" not in source
    assert "@import" not in source

    assert not {"script", "i", "b"} & set(shown.tags)
    for text in ("a&b", "<i>set</i>", "OptEq & friends", "<script>alert(1)</script>"):
        assert text in shown.text
    for number in ("98.76%", "12,345", "7.2", "9.1e-05", "12 min 05 s", "3,120 images/s", "512 MB"):
        assert number in shown.text
    assert "missing" not in shown.text.lower()


@pytest.mark.spec("R5.7")
@pytest.mark.parametrize(
    ("body", "hidden", "pictures"), [(Unit, (4, 4), 16), (Unit, (4,), 13), (Gaussian, (8, 8), 17)]
)
def test_branches_have_their_pictures(run, data, body, hidden, pictures):
    torch.manual_seed(0)
    options = {"patch_size": 1} if body is Gaussian else {}
    network = branch_classifier(
        body, classes=7, channels=4, hidden=hidden, reductions=(1, 3)[: len(hidden)], **options
    )
    shown = Page(write_report(run, network, data))
    assert shown.tags.count("svg") == pictures
    assert "Each branch is an equilibrium at its own resolution" in shown.text
    share = records.TestRecord.load(run / "record.npz").branches.diagonal_share
    assert ("the diagonal holds" in shown.text) == (len(hidden) > 1)
    if len(hidden) > 1:
        assert f"{share.mean():.1%}" in shown.text


def equilibrium_of(network, equilibrium_map, **options):
    network[1] = EquilibriumLayer(equilibrium_map, **options)
    return network


@pytest.mark.usefixtures("undrawn")
@pytest.mark.spec("R6.4")
def test_the_page_says_what_the_equilibria_are(run, network, data):
    certified = (
        "the minimum of the hidden objective φ that the layer's weights and the image define, certified"
    )
    assert certified in Page(write_report(run, network, data)).text

    # Without a ceiling nothing is certified of a Gaussian kernel map, though its equilibria are local minima.
    steep = GaussianMap(Conv2d(6, 6, 3), Conv2d(6, 6, 3), max_norm=None)
    steep.W.weight.data *= 3
    text = Page(write_report(run, equilibrium_of(network, steep, on_unconverged="count"), data)).text
    kinds = re.search(
        r"where the hidden objective φ .* is stationary\. Of the 6 images below it is certified to be the"
        r" minimum of φ for 0, by an estimate a local minimum for (\d), and not known to be one for (\d)\.",
        text,
    )
    assert kinds
    assert int(kinds[1]) + int(kinds[2]) == 6
    traces = records.TestRecord.load(run / "record.npz").traces
    assert not traces.minimiser.any()
    assert traces.local_minimiser.sum() == int(kinds[1])

    deep = DeepOptEq([OptEqUnit(Conv2d(6, n, 3), Conv2d(6, n, 3)) for n in (4, 5, 6)])
    text = Page(write_report(run, equilibrium_of(network, deep), data)).text
    assert re.search(r"leaves unchanged\.\s", text)
    assert "This map has no hidden objective" in text


def test_the_record_and_the_picture_lie_beside_the_page(written):
    run, data = written.run, written.data
    record = records.TestRecord.load(run / "record.npz")
    np.testing.assert_array_equal(record.labels, data.labels.numpy())
    assert record.class_names == tuple(data.class_names)
    assert (run / "equilibrium.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.spec("R7.9")
def test_the_page_says_what_the_equilibrium_is_worth(written):
    run, shown = written.run, written.page
    stored = json.loads((run / "equilibrium.json").read_text())
    record = records.TestRecord.load(run / "record.npz")
    assert stored["full_accuracy"] == pytest.approx(record.accuracy(), abs=1e-12)
    sentence = (
        f"With one evaluation of the map in place of every equilibrium {stored['accuracy'][0]:.2%} of the"
        f" answers on 90 test images are right, with the equilibrium {stored['full_accuracy']:.2%}"
    )
    assert sentence in shown.text
    (layer,) = stored["layers"]
    assert f"{layer['active'][0]:.1%}" in shown.text
    assert f"{layer['spectra'][0]['values'][0]:.3f}" in shown.text
    assert shown.tags.count("table") == 4
    # 216 numbers on either side: the whole spectrum.
    assert len(layer["spectra"][0]["values"]) == 216


def test_the_scores_of_each_class_stand_in_a_table_the_lowest_first(written):
    run = written.run
    html = (run / "report.html").read_text(encoding="utf-8")
    rows = re.search(r"Scores of each class.*?<tbody>(.*?)</tbody>", html, re.DOTALL)[1]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows.split("</tr>")[:-1]]
    record = records.TestRecord.load(run / "record.npz")
    labels, predictions = record.labels, record.predictions
    expected = []
    for c, name in enumerate(record.class_names):
        right, taken = ((labels == c) & (predictions == c)).sum(), (predictions == c).sum()
        count = (labels == c).sum()
        f1 = 2 * right / (count + taken)
        precision = f"{right / taken:.1%}" if taken else "–"
        texts = [escape(name), str(count), f"{right / count:.1%}", precision, f"{f1:.1%}"]
        expected.append((f1, texts))
    assert cells == [texts for _, texts in sorted(expected, key=lambda pair: pair[0])]


@pytest.mark.usefixtures("undrawn")
def test_what_did_not_change_is_a_sentence(run, network, data):
    (run / "metrics.csv").write_text(
        "epoch,step,train_loss,val_accuracy,val_unconverged\n0,9,2.0,0.5,0\n1,19,1.0,0.5,0\n"
    )
    shown = Page(write_report(run, network, data))
    assert "Accuracy: 50.00% throughout. Unconverged solves: 0 throughout." in shown.text
    assert shown.tags.count("svg") == 12


def test_every_equilibrium_has_its_bound(written):
    run, network, data, text = written.run, written.network, written.data, written.page.text
    assert "Above each z* stands how far from the true one it is at most" in text
    traces = records.TestRecord.load(run / "record.npz").traces
    pixels = torch.from_numpy(traces.images).movedim(-1, 1)
    mean, deviation = (torch.tensor(values)[:, None, None] for values in data.normalization)
    stem, layer = copy.deepcopy(network[:2]).double().eval()
    with torch.no_grad():
        features = stem(((pixels - mean) / deviation).double())
        shown = layer(features)
        layer.solver = Anderson(tol=1e-12, max_steps=500)
        gap = (shown - layer(features)).flatten(1).norm(dim=1).numpy()
    assert (gap <= 1.001 * traces.distance).all()
    assert (traces.distance < 0.1 * shown.flatten(1).norm(dim=1).numpy()).all()


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_made_it(run, network, data, written):
    assert "How it was made" not in written.page.text
    (run / "versions.json").write_text(json.dumps(VERSIONS))
    text = Page(write_report(run, network, data)).text
    for value in VERSIONS.values():
        assert value in text


@pytest.mark.usefixtures("undrawn")
def test_the_accuracy_says_of_how_many_images_and_how_sure_it_is(run, network, data, monkeypatch):
    text = Page(write_report(run, network, data)).text
    right = round(90 * records.TestRecord.load(run / "record.npz").accuracy())
    low, high = accuracy_interval(right, 90)
    assert f"of 90 test images; 95 % interval {low:.1%} to {high:.1%}" in text
    monkeypatch.setattr(report, "_SURE", (high - low) / 2)
    text = Page(write_report(run, network, data)).text
    assert "of 90 test images\n" in text
    assert "interval 0" not in text


def test_accuracy_comes_first(written):
    text = written.page.text
    assert text.index("Test accuracy") < text.index("Parameters")


@pytest.fixture
def look(browser, written):
    """Opens the report in a browser."""
    opened = []

    def look(width, **media):
        page = browser.new_page(viewport={"width": width, "height": 800})
        opened.append(page)
        page.set_default_timeout(PATIENCE)
        page.emulate_media(**media)
        page.goto(written.path.as_uri())
        return page

    yield look
    for each in opened:
        each.close()


def pixels_of(locator):
    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("L")).astype(int)


def test_figures_are_in_the_colours_of_the_page(look):
    def ground_and_lines(**media):
        loss = pixels_of(look(1400, **media).locator("figure").first)
        # Behind the frame of the card; its caption, title and axes.
        return np.median(loss), np.abs(loss - np.median(loss)).max()

    dark, contrast = ground_and_lines(color_scheme="dark")
    assert dark < 50
    assert contrast > 150
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark", "media": "print"}):
        light, contrast = ground_and_lines(**media)
        assert light == 255
        assert contrast > 150


def contrast(one, other):
    """The ratio of the luminances of two colours `#rrggbb`, from 1 to 21, as WCAG 2 defines it."""

    def luminance(colour):
        parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        return np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]

    lighter, darker = sorted((luminance(one) + 0.05, luminance(other) + 0.05), reverse=True)
    return lighter / darker


def test_small_letters_in_pictures_can_be_read_on_light_and_dark_pages():
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})\b", rules)) for rules in _CSS.split(":root")[1:3])
    for colour, variable in _VARIABLES.items():
        if variable not in ("--frame", "--grid", "--blue"):
            assert contrast(colour, light["card"]) >= 4.5, variable
            assert contrast(dark[variable.removeprefix("--")], dark["card"]) >= 4.5, variable


def test_a_confusion_matrix_is_dark_on_a_dark_page(look):
    matrix = look(1400, color_scheme="dark").locator("figure", has_text="Confusion matrix")
    assert (pixels_of(matrix) > 150).mean() < 0.05


def test_labels_are_as_large_on_a_phone_as_elsewhere(look):
    page = look(390)
    pictures = page.locator("figure.wide svg")
    assert page.locator("figure.wide", has_text="Confusion matrix").count() == 1
    assert page.locator("figure.wide", has_text="Right predictions").count() == 0
    for picture in pictures.all():
        # What is drawn in points is shown in as many, of which three are four pixels.
        width = float(picture.get_attribute("width").removesuffix("pt"))
        assert picture.bounding_box()["width"] == pytest.approx(width * 4 / 3, rel=0.01)


def test_cards_are_as_wide_as_a_phone(look):
    page = look(390)
    boxes = [card.bounding_box() for card in page.locator("figure, .table, .tiles").all()]
    assert {(box["x"], box["width"]) for box in boxes} == {(14, 362)}


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_its_residuals_are(run, network, data):
    (run / "metrics.csv").write_text("epoch,step,train_residual_max\n0,9,1e-3\n1,19,2e-4\n")
    html = write_report(run, network, data).read_text(encoding="utf-8")
    assert "Largest relative residual ‖T(z) - z‖ / ‖T(z)‖, without unit, that a solve ended with" in html
    assert "in float64, for a few test images" in html
    assert "in the precision that the network has" in html


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_scrolls_on_a_phone_is_shaded_where_it_goes_on(look, scheme):
    page = look(390, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.locator(".table", has_text="Accuracy without the equilibrium")
    assert wide.evaluate("e => e.scrollWidth > e.clientWidth")

    def sides():
        # Of the lower padding, in which nothing is written.
        row = pixels_of(wide)[-8]
        ground = row[len(row) // 2]
        return [abs(row[3] - ground) > 15, abs(row[-4] - ground) > 15]

    assert sides() == [False, True]
    wide.evaluate("e => e.scrollLeft = e.scrollWidth")
    assert sides() == [True, False]


def test_a_residual_of_zero_is_explained(written):
    record = records.TestRecord.load(written.run / "record.npz")
    tiles = headline({"residual_max": 0.0}, {}, record)
    assert "0 to the last bit" in tiles
    assert "0.0e+00" not in tiles


def test_wide_pictures_scroll_on_a_phone():
    assert 'class="wide"' in image(new_figure(9, 3), "wide")
    assert "wide" not in image(new_figure(4.2, 3), "small")


@pytest.mark.usefixtures("undrawn")
def test_a_part_of_a_large_test_set_is_iterated_on(run, network, data, monkeypatch):
    monkeypatch.setattr(report, "_STUDIED", 30)
    loader = DataLoader(TensorDataset(data.images, data.labels), 32)
    monkeypatch.setattr(data, "test_dataloader", lambda: loader)
    text = Page(write_report(run, network, data)).text
    assert json.loads((run / "equilibrium.json").read_text())["samples"] == 30
    assert "answers on 30 test images" in text


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_is_missing(run, network, data):
    (run / "summary.json").unlink()
    (run / "metrics.csv").unlink()
    (run / "config.yaml").unlink()
    text = Page(write_report(run, network, data)).text
    assert "summary.json is missing" in text
    assert "metrics.csv is missing" in text
    accuracy = records.TestRecord.load(run / "record.npz").accuracy()
    assert f"{accuracy:.2%}" in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_curves_says_so(run, network, data):
    (run / "metrics.csv").write_text("epoch,step,val_loss\n")
    assert "no training curves yet" in Page(write_report(run, network, data)).text


@pytest.mark.usefixtures("undrawn")
def test_a_network_without_equilibria_and_a_single_class(run, data):
    data.class_names = ["only"]
    data.labels.zero_()
    plain = nn.Sequential(nn.Flatten(), nn.Linear(108, 1))
    text = Page(write_report(run, plain, data)).text
    assert "no equilibrium layer" in text
    assert "90 of 90 test images" in text
    assert "is worth" not in text
    assert not list(run.glob("equilibrium*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", '{"parameters": 12', r"summary\.json is not valid JSON"),
        ("summary.json", "[1, 2]", "one JSON object, got list"),
        ("summary.json", '{"parameters": "many"}', "`parameters` in summary.json .*'many'"),
        ("metrics.csv", "loss\n1\n", "a column `epoch`"),
    ],
)
def test_a_malformed_file_is_named(run, network, data, name, content, message):
    (run / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        write_report(run, network, data)


EVIL = '"><b>bold</b>'


@pytest.mark.parametrize(
    "html",
    [
        page(EVIL, EVIL, [], EVIL),
        section(EVIL, EVIL),
        tiles([(EVIL, EVIL, EVIL)]),
        table(EVIL, [EVIL], [[EVIL]]),
        image(new_figure(1, 1), EVIL),
        missing(EVIL),
        folded(EVIL, EVIL),
        facts([(EVIL, EVIL)]),
    ],
)
def test_every_part_of_a_page_escapes_its_text(html):
    assert "<b>" not in html
    assert "&quot;&gt;&lt;b&gt;bold" in html


COMMAND = (
    "opteq fit --config digits --model.network.body.solver opteq.solvers.Anderson"
    " --model.network.body.solver.max_steps 60 --trainer.max_epochs 1"
    " --run /tmp/runs-of-a-long-name/that-lie-in-one-another/one"
)


def lines_of(cell):
    """The lines that the text of a cell stands in, without blanks."""
    # Of each character that is not blank, the line that it is on.
    tops = cell.evaluate(
        """cell => {
            const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
            for (let text; (text = texts.nextNode()); )
                for (let i = 0; i < text.length; i++) {
                    if (text.data[i] === ' ') continue;
                    const range = document.createRange();
                    range.setStart(text, i);
                    range.setEnd(text, i + 1);
                    found.push([text.data[i], range.getBoundingClientRect().top]);
                }
            return found; }"""
    )
    return ["".join(c for c, _ in line) for _, line in groupby(tops, key=lambda pair: round(pair[1]))]


@pytest.mark.parametrize("width", [1400, 390])
def test_a_command_breaks_between_its_options(browser, width):
    shown = browser.new_page(viewport={"width": width, "height": 800})
    shown.set_content(page("run", "", [facts([("command", COMMAND)])], ""))
    cell = shown.locator("td + td")
    assert (
        cell.evaluate("e => { getSelection().selectAllChildren(e); return `${getSelection()}` }") == COMMAND
    )
    lines = lines_of(cell)
    shown.close()
    assert "".join(lines) == COMMAND.replace(" ", "")
    assert len(lines) > 1
    if width == 1400:
        assert all(line.startswith("--") for line in lines[1:])
    else:
        assert "--trainer.max_epochs1" in lines
        # What does not fit breaks before its value, and then at dots and slashes.
        assert {
            "--model.network.body.solver",
            "opteq.solvers.Anderson",
            "--model.network.body.solver.",
            "max_steps",
        } <= set(lines)
        assert "/tmp/runs-of-a-long-name/" in lines


def test_numbers_of_a_version_stay_in_one_line(browser):
    system = "Linux-6.18.44-fc-v657-x86_64-with-glibc2.36"
    shown = browser.new_page(viewport={"width": 390, "height": 800})
    shown.set_content(page("run", "", [facts([("the system", system)])], ""))
    first, second = lines_of(shown.locator("td + td"))
    assert first + second == system
    assert first.startswith("Linux-6.18.44-")
    assert first.endswith("-")
    shown.close()


def test_scores_of_classes_fit_a_phone(browser):
    shown = browser.new_page(viewport={"width": 390, "height": 800})
    header = ["class", "images", "recall", "precision", "F1"]
    shown.set_content(page("run", "", [table("Scores", header, [["airplane", "5", *["100.0%"] * 3]])], ""))
    assert shown.locator(".table").evaluate("e => e.scrollWidth <= e.clientWidth")
    shown.close()
