"""What results print, and how they show themselves in a notebook."""

import dataclasses
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from opteq import Anderson, Conv2d, EquilibriumLayer, Implicit, OptEqUnit, Unrolled, certify, solve_log
from opteq.errors import ConfigError
from opteq.notebook import html_table
from opteq.results import Certificate, Solution, SolveInfo


def test_large_tensors_are_described():
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(4, 8), Conv2d(3, 8)), Anderson(tol=1e-4))
    x = torch.rand(9, 3, 8, 8)
    solution = layer.solve(x, trace=True)
    assert "value=tensor of shape (9, 4, 8, 8), torch.float32" in repr(solution)
    steps = solution.info.steps.tolist()
    assert f"steps=tensor of shape (9,), torch.int64, from {min(steps)} to {max(steps)}" in repr(solution)
    assert len(repr(solution)) < 2500


def test_few_numbers_are_shown():
    assert repr(Certificate(torch.tensor([0.5, 2.0]), "bound")) == (
        "Certificate(value=tensor([0.5000, 2.0000]), kind='bound', assumptions=())"
    )
    info = SolveInfo(torch.ones(1, 2), torch.tensor([2]), torch.tensor([True]), 2)
    branches = (torch.zeros(2, 3, 4), torch.zeros(1))
    assert repr(Solution(branches, info, branches[0])).startswith(
        "Solution(value=(tensor of shape (2, 3, 4), torch.float32, tensor([0.])), info=SolveInfo("
    )


class Cells(HTMLParser):
    """The cells of a table by the header of their row, and all that a page may not load or run."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.tags, self._open = {}, set(), None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not {"src", "href"} & {name for name, _ in attributes}
        self._open = tag
        if tag == "th":
            self._header = ""

    def handle_data(self, data):
        if self._open == "th":
            self._header += data
        elif self._open == "td":
            self.rows.setdefault(self._header, []).append(data)

    def handle_endtag(self, tag):
        self._open = None


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return EquilibriumLayer(OptEqUnit(Conv2d(4, 8), Conv2d(3, 8)), Anderson(tol=1e-4))


def test_the_table_of_a_solution(layer):
    solution = layer.solve(torch.rand(3, 3, 6, 6), trace=True)
    html = solution._repr_html_()
    cells = Cells(html)
    assert cells.tags == {"table", "caption", "tbody", "tr", "th", "td"}
    steps, energy = solution.info.steps, solution.trace.energy
    counts = {int(steps.min()), int(steps.max())}
    ends = [row[~row.isnan()][-1].item() for row in solution.info.residuals]
    assert cells.rows == {
        "shape": ["(3, 4, 6, 6) torch.float32"],
        "steps": [" to ".join(map(str, sorted(counts)))],
        "converged": ["3 of 3 samples"],
        "residual": [f"{max(ends):.1e}, largest; tolerance 1.0e-04"],
        "objective": [f"{energy[:, 0].sum() / 3:.4g} → {energy[:, -1].sum() / 3:.4g}, mean"],
    }
    # What has a colour of its own is unreadable on one of a light and a dark page.
    assert not re.search(r"#[0-9a-f]{3}|rgb|white|black", html)
    (samples,) = Cells(solution.trace._repr_html_()).rows["samples"]
    assert samples == "3"
    assert "objective" not in Cells(layer.solve(torch.rand(1, 3, 6, 6))._repr_html_()).rows
    assert Cells(layer.solve(torch.zeros(0, 3, 6, 6))._repr_html_()).rows["converged"] == ["0 of 0 samples"]


@pytest.mark.parametrize("samples", [1, 9])
def test_a_certificate_shows_the_numbers_that_matter(layer, samples):
    found = certify(layer, torch.rand(samples, 3, 6, 6))
    shown = {
        "samples": f"{samples}",
        "largest distance": f"{max(found.distance.value.tolist()):.1e} (bound)",
        "largest contraction": f"{max(found.contraction.value.flatten().tolist()):.6g} (bound)",
        "largest residual": f"{max(found.residual.tolist()):.1e}",
    }
    text = ", ".join(f"{name}: {value}" for name, value in shown.items())
    assert repr(found) == f"LayerCertificate({text})"
    assert Cells(found._repr_html_()).rows == {name: [value] for name, value in shown.items()}


def test_a_certificate_of_no_samples_is_shown(layer):
    assert repr(certify(layer, torch.zeros(0, 3, 6, 6))).startswith("LayerCertificate(samples: 0, ")


def test_the_table_of_a_log(layer):
    layer.solver, layer.on_unconverged = Anderson(tol=1e-4, max_steps=2), "count"
    with solve_log(layer) as log:
        layer(torch.rand(3, 3, 6, 6)).sum().backward()
        layer(torch.rand(2, 3, 6, 6))
    rows = Cells(log._repr_html_()).rows
    assert rows["solves"] == ["2", "1"]
    assert rows["samples"] == ["5", "3"]
    assert rows["converged"] == ["0 of 5", "3 of 3"]


def test_tables_are_escaped():
    html = html_table("<a>", {"<b>": ["&", "<script>"]})
    assert Cells(html).tags == {"table", "caption", "tbody", "tr", "th", "td"}
    assert Cells(html).rows == {"<b>": ["&", "<script>"]}


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def test_the_picture_of_a_trace(layer):
    solution = layer.solve(torch.rand(3, 3, 6, 6), trace=True)
    _, own = pyplot.subplots()
    axes = solution.plot(own)
    left, right = axes.figure.axes
    assert axes is own is left
    assert left.get_yscale() == right.get_yscale() == "log"
    drawn = lines_of(left)["median"].get_ydata()
    np.testing.assert_allclose(drawn, np.median(solution.trace.residual.numpy(), axis=0), rtol=1e-6)
    assert list(lines_of(left)["tolerance"].get_ydata()) == [1e-4, 1e-4]
    # Neither the tolerance nor the start, at 1, lies on the frame.
    low, high = np.log10(left.get_ylim())
    assert low < -4.1
    assert high > 0.1
    energy = solution.trace.energy.numpy()
    above = np.median(energy[:, 0] - energy.min(axis=1))
    assert lines_of(right)["median"].get_ydata()[0] == pytest.approx(above, rel=1e-6)
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        "residual, median",
        "tolerance",
        "objective, median",
    ]
    pyplot.close("all")


def test_the_picture_of_a_solve(layer):
    solution = layer.solve(torch.rand(1, 3, 6, 6))
    axes = solution.plot()
    assert axes.figure.axes == [axes]
    np.testing.assert_allclose(lines_of(axes)["median"].get_ydata(), solution.info.residuals[0].numpy())
    layer = EquilibriumLayer(OptEqUnit(Conv2d(4, 8), Conv2d(3, 8)), gradient=Unrolled(3))
    assert "tolerance" not in lines_of(layer.solve(torch.rand(1, 3, 6, 6)).plot())
    pyplot.close("all")


def test_the_picture_of_a_log(layer):
    infos = []
    layer.gradient = Implicit(tol=1e-3)
    with solve_log(layer) as log:
        for _ in range(2):
            solution = layer.solve(torch.rand(3, 3, 6, 6))
            infos.append(solution.info)
            solution.value.sum().backward()
    axes = log.plot()
    lines = lines_of(axes)
    ends = [max(row[~row.isnan()][-1].item() for row in info.residuals) for info in infos]
    assert list(lines["forward"].get_ydata()) == ends
    assert len(lines["adjoint"].get_ydata()) == 2
    assert lines["forward tolerance"].get_ydata()[0] == 1e-4
    assert lines["adjoint tolerance"].get_ydata()[0] == 1e-3
    # No tolerance on the frame, and nothing marked where everything converged.
    assert axes.get_ylim()[0] < min(ends) < 1e-3 < axes.get_ylim()[1]
    assert set(lines) == {"forward", "adjoint", "forward tolerance", "adjoint tolerance"}
    _, right = axes.figure.axes
    assert [bar.get_height() for bar in right.patches[:2]] == [
        pytest.approx(float(info.steps.double().mean())) for info in infos
    ]
    assert len(right.patches) == 4
    pyplot.close("all")
    with solve_log(layer) as log:
        pass
    assert not log.plot().get_lines()
    pyplot.close("all")


def test_the_picture_of_a_log_marks_the_solves_that_fell_short(layer):
    solver, layer.on_unconverged = layer.solver, "count"
    with solve_log(layer) as log, torch.no_grad():
        for steps in (50, 2, 50, 1):
            layer.solver = dataclasses.replace(solver, max_steps=steps)
            layer(torch.rand(3, 3, 6, 6))
    axes = log.plot()
    (marks,) = (line for name, line in lines_of(axes).items() if "unconverged" in name)
    assert marks.get_label() == "forward, unconverged (6 of 12 samples)"
    assert list(marks.get_xdata()) == [2, 4]
    assert list(marks.get_ydata()) == [log.forward.residuals[1], log.forward.residuals[3]]
    assert [bar.get_height() for bar in axes.figure.axes[1].patches][1::2] == [2, 1]
    pyplot.close("all")


def test_without_matplotlib_a_picture_says_what_it_needs(layer, monkeypatch):
    solution = layer.solve(torch.rand(1, 3, 6, 6))
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "opteq.plots"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("opteq.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs the package matplotlib: pip install matplotlib\.$"):
        solution.plot()
    assert "shape" in solution._repr_html_()
