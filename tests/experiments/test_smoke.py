"""Every packaged table runs, from the training of its rows to the page of results."""

import json
import warnings

import pytest

from opteq.cli import main
from opteq.experiments.tables import read_table, table_names


@pytest.mark.parametrize("name", table_names())
def test_every_table_trains_and_is_measured(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, at so few images, and of solves that start badly
        assert main(["reproduce", name, "--scale", "smoke"]) == 0
    folder = tmp_path / "reproduced" / "smoke" / name
    table, scores = read_table(name, "smoke"), json.loads((folder / "table.json").read_text())
    measured = {score for row in table.rows for score in scores[row.name]["0"]}
    claimed = {claim.score for claim in table.claims if claim.score}
    assert {*table.columns, table.compare, *claimed} <= measured
    page = (folder / "table.md").read_text()
    assert "the numbers mean nothing" in page
    assert all(f"| {row.name} | 1 |" in page for row in table.rows)
