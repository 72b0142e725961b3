"""Running a packaged table from the training of its rows to the page of results, on noise."""

import json
import warnings

from opteq.cli import main
from opteq.experiments.tables import read_table, table_names


def of(*papers):
    """The names of the tables of some papers."""
    return [name for name in table_names() if name.startswith(papers)]


def check(name, folder):
    """Run the table in `folder`, where others may have trained alike, and look for all that it is to show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, at so few images, and of solves that start badly
        output = folder / name
        assert main(["reproduce", name, "--scale", "smoke", "--output", str(output)]) == 0
    table, scores = read_table(name, "smoke"), json.loads((output / "table.json").read_text())
    measured = {score for row in table.rows for score in scores[row.name]["0"]}
    claimed = {claim.score for claim in table.claims if claim.score}
    assert {*table.columns, table.compare, *claimed} <= measured
    page = (output / "table.md").read_text()
    assert "the numbers mean nothing" in page
    assert all(f"| {row.name} | 1 |" in page for row in table.rows)
