"""The notebook, whose cells run without Jupyter."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


@pytest.fixture
def cells():
    return json.loads(TOUR.read_text(encoding="utf-8"))["cells"]


@pytest.fixture
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_the_cells_run(cells, capsys):
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(pyplot.get_fignums()) == 3
    pyplot.close("all")
    assert names["accuracy"] > 0.9
    assert names["log"].forward.unconverged == 0
    assert "distance at most" in capsys.readouterr().out


def test_what_is_stored_is_small_and_was_run_from_top_to_bottom(cells):
    assert TOUR.stat().st_size < 300_000
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "display_data" in kinds
    assert "error" not in kinds
    assert not any(output.get("name") == "stderr" for cell in code for output in cell["outputs"])


def test_the_file_is_a_notebook():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(TOUR, as_version=4))
