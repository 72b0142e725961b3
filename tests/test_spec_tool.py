import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "spec.py"


@pytest.fixture
def run_tool(tmp_path):
    """Run the tool in a small project with rows R1.1 and R1.2 and the given test file."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "theory.md").write_text("### R1.1 A row\n\nSee R9.9.\n\n### R1.2 Another\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = spec(*rows): rows\n")

    def run(tests):
        (tmp_path / "test_it.py").write_text(f"import pytest\n\n{tests}\n")
        return subprocess.run(
            [sys.executable, TOOL], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


def test_counts_functions_not_cases(run_tool):
    result = run_tool(
        '@pytest.mark.spec("R1.1")\n'
        '@pytest.mark.parametrize("case", [1, 2, 3])\n'
        "def test_cases(case): pass\n\n"
        '@pytest.mark.spec("R1.1")\n'
        "def test_other(): pass"
    )
    assert result.returncode == 0
    assert result.stdout.splitlines() == ["R1.1  2", "R1.2  0", "Rows without a test: R1.2"]


def test_counts_a_test_under_each_row_of_its_own_and_its_class(run_tool):
    result = run_tool(
        '@pytest.mark.spec("R1.1")\n'
        "class TestBoth:\n"
        '    @pytest.mark.spec("R1.2")\n'
        "    def test_it(self): pass"
    )
    assert result.returncode == 0
    assert result.stdout.splitlines() == ["R1.1  1", "R1.2  1", "Rows without a test: none"]


def test_fails_on_an_unlisted_row_and_names_the_test(run_tool):
    result = run_tool('@pytest.mark.spec("R9.9")\ndef test_stray(): pass')
    assert result.returncode == 1
    assert "no row R9.9" in result.stderr
    assert "test_it.py::test_stray" in result.stderr


def test_fails_when_the_tests_cannot_be_collected(run_tool):
    result = run_tool("import nowhere_to_be_found")
    assert result.returncode != 0
    assert "nowhere_to_be_found" in result.stderr
