import json
import re
import sys

import pytest
import torch

from opteq.training.summary import write_versions


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/somewhere/bin/opteq", "opteq fit --run 'a b'"),
        ("/somewhere/opteq/__main__.py", "opteq fit --run 'a b'"),
        ("/somewhere/bin/pytest", None),
    ],
)
def test_versions_say_by_what_command_when_and_on_what(tmp_path, monkeypatch, program, command):
    monkeypatch.setattr(sys, "argv", [program, "fit", "--run", "a b"])
    write_versions(tmp_path)
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions.get("command") == command
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d[+-]\d\d:\d\d", versions["date"])
    assert versions["processor"]
    assert versions["cores"] == str(torch.get_num_threads())
