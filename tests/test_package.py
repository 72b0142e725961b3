import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import opteq

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("opteq-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_file_of_the_package(wheel_files):
    source = ROOT / "src"
    sources = {
        path.relative_to(source).as_posix()
        for path in (source / "opteq").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {file for file in wheel_files if ".dist-info/" not in file} == sources


def test_wheel_holds_configurations_types_and_licence(wheel_files):
    assert "opteq/py.typed" in wheel_files
    assert "opteq/configs/digits.yaml" in wheel_files
    assert any(file.endswith("licenses/LICENSE") for file in wheel_files)


def test_an_attribute_that_there_is_not_may_have_been_another():
    with pytest.raises(AttributeError, match=r"no attribute 'Andersn'; did you mean Anderson\?$"):
        opteq.Andersn  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'laod'; did you mean load\?$"):
        opteq.laod  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'dance'$"):
        opteq.dance  # noqa: B018


def test_version_is_the_same_everywhere():
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert citation[1] == importlib.metadata.version("opteq") == opteq.__version__
    native = tomllib.loads((ROOT / "native-wheel" / "pyproject.toml").read_text())["project"]
    assert native["version"] == opteq.__version__
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["native"] == [f"opteq-native=={opteq.__version__}"]
    assert f"## {opteq.__version__}" in (ROOT / "CHANGELOG.md").read_text()
