import json

import pytest

from opteq.errors import ConfigError
from opteq.evaluation.parts import Parts


def test_parts_that_a_file_holds_are_not_measured_again(tmp_path):
    path, taken = tmp_path / "evaluation" / "scores.json", []

    def take(name):
        if name == "c" and len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(name)
        return len(taken)

    with pytest.raises(KeyboardInterrupt):
        Parts(path, {"checkpoint": "one"}).measure(["a", "b", "c"], take)
    assert json.loads(path.read_text()) == {"checkpoint": "one", "parts": {"a": 1, "b": 2}}
    taken.append("interrupt")
    assert Parts(path, {"checkpoint": "one"}).measure(["a", "b", "c"], take) == {"a": 1, "b": 2, "c": 4}
    assert taken == ["a", "b", "interrupt", "c"]


def test_another_checkpoint_begins_anew(tmp_path):
    path = tmp_path / "scores.json"
    Parts(path, {"checkpoint": "one"}).measure(["a"], lambda name: 1)
    assert Parts(path, {"checkpoint": "two"}).measure(["a"], lambda name: 2) == {"a": 2}
    assert json.loads(path.read_text()) == {"checkpoint": "two", "parts": {"a": 2}}


def test_numbers_that_are_not_known_are_null(tmp_path):
    parts = Parts(tmp_path / "scores.json")
    parts.write(scores={"a": float("nan")})
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == {"a": None}


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "scores.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"scores\.json is not valid JSON"):
        Parts(path, {})


def test_batches_come_through_within_and_outside_of_parts():
    parts = Parts()
    assert list(parts.follow([1, 2])) == [1, 2]
    assert parts.measure(["a"], lambda name: list(parts.follow(iter([3, 4])))) == {"a": [3, 4]}
