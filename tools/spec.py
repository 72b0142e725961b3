"""Count the tests behind each row of docs/theory.md.

A test says which rows it shows to hold with `@pytest.mark.spec("R1.3", ...)`. This script collects
the tests, prints each row with its number of tests, and names the rows that have none. A
parametrised test counts once, however many cases it has. A marker that names a row which the page
does not list is an error.

Run it in the repository root: `python tools/spec.py`.
"""

import contextlib
import io
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

THEORY = Path("docs/theory.md")
ROW = re.compile(r"^### (R\d+\.\d+)\b", re.MULTILINE)


class SpecCounter:
    """A pytest plugin that notes which tests name which row."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            function = item.nodeid.partition("[")[0]
            for marker in item.iter_markers("spec"):
                for row in marker.args:
                    self.tests[row].add(function)


def main() -> int:
    """Print the counts and return the exit status."""
    counter = SpecCounter()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(["--collect-only", "-q"], plugins=[counter])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.stderr.write(output.getvalue())
        return int(status)

    rows = ROW.findall(THEORY.read_text(encoding="utf-8"))
    for row in rows:
        print(f"{row}  {len(counter.tests[row])}")
    print("Rows without a test:", ", ".join(r for r in rows if not counter.tests[r]) or "none")

    unlisted = {row: tests for row, tests in counter.tests.items() if row not in rows}
    for row, tests in sorted(unlisted.items()):
        print(f"{THEORY} has no row {row}, named by {', '.join(sorted(tests))}", file=sys.stderr)
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
