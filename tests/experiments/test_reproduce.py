"""Small tables of digits, trained for one epoch."""

import json
import re

import pytest

from opteq.cli import main
from opteq.errors import ConfigError
from opteq.experiments.reproduce import reproduce
from opteq.experiments.tables import read_table

TABLE = """
title: Units on digits
source: None
reference: one
columns: [test_accuracy, parameters, inference_ms, residual, mean_l1]
measure:
  - opteq.experiments.costs.step_times
  - opteq.experiments.measures.relative_residual
  - opteq.experiments.measures.feature_norms
config:
  model:
    network:
      class_path: opteq.models.classifier.ImageClassifier
      init_args:
        stem: {class_path: opteq.models.stems.ConvStem, init_args: {channels: 8, downsamplings: 1}}
        body: {class_path: opteq.models.bodies.Unit, init_args: {hidden: 8}}
        head: {class_path: opteq.models.heads.Head}
  data:
    class_path: opteq.data.digits.Digits
    init_args: {train_limit: 64}
  trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false}
curves: {ceiling: {0.97: one, 0.5: tight}}
rows:
  - {name: one}
  - {name: tight, changes: {model.network.body.max_norm: 0.5}}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "units.yaml"
    path.write_text(TABLE, encoding="utf-8")
    return path


def stop(_: str) -> None:
    raise KeyboardInterrupt


def test_a_stopped_table_goes_on_where_it_was(path, tmp_path, capsys):
    output, options = tmp_path / "out", ["--data.batch_size", "32"]
    with pytest.raises(KeyboardInterrupt, match="finished runs are kept, and the same command goes on"):
        reproduce(read_table(str(path)), output, options, stop)
    first = output / "one-seed0" / "model.safetensors"
    written, weights = first.stat().st_mtime_ns, first.read_bytes()
    assert not (output / "tight-seed0").exists()

    # A run that ended between its last checkpoint and its results is finished, not trained again.
    (output / "one-seed0" / "summary.json").unlink()
    (output / "one-seed0" / "scores.json").unlink()
    first.unlink()
    assert main(["reproduce", str(path), "--output", str(output), *options]) == 0
    assert first.read_bytes() == weights
    written = first.stat().st_mtime_ns
    said = capsys.readouterr().out
    assert "[1/2] one" in said
    assert "[2/2] tight" in said
    assert re.search(r"\[1/2\] one, seed 0: test_accuracy [\d.]+; about \d+:\d\d left", said)
    assert re.search(r"\[2/2\] tight, seed 0: test_accuracy [\d.]+$", said, re.MULTILINE)

    assert main(["reproduce", str(path), "--output", str(output), *options]) == 0
    assert first.stat().st_mtime_ns == written
    assert "[1/2]" not in capsys.readouterr().out

    scores = json.loads((output / "table.json").read_text())
    for row in ("one", "tight"):
        found = scores[row]["0"]
        assert 0 < found["residual"] < 1e-3
        assert all(found[name] > 0 for name in ("inference_ms", "step_ms", "backward_ms"))
        assert found["mean_l1"] ** 2 <= found["mean_square"]
    lines = (output / "table.md").read_text().splitlines()
    assert any("`--data.batch_size 32`" in line for line in lines)
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["one", "tight"]
    assert b"<svg" in (output / "table.svg").read_bytes()
    assert b"<svg" in (output / "curves.svg").read_bytes()


def test_a_folder_is_not_mixed_with_other_options(path, tmp_path):
    table = read_table(str(path))
    with pytest.raises(KeyboardInterrupt):
        reproduce(table, tmp_path, [], stop)
    with pytest.raises(ConfigError, match="choose another --output"):
        reproduce(table, tmp_path, ["--trainer.max_epochs", "2"], print)
    changed = path.with_name("changed.yaml")
    changed.write_text(TABLE.replace("max_norm: 0.5", "max_norm: 0.6"), encoding="utf-8")
    with pytest.raises(ConfigError, match="tight-seed0"):
        reproduce(read_table(str(changed)), tmp_path, [], print)


def test_an_unknown_score_is_answered_with_those_that_there_are(path, tmp_path):
    other = path.with_name("other.yaml")
    text = TABLE.replace("reference: one", "reference: one\ncompare: luck").split("measure:")
    other.write_text(text[0] + text[1][text[1].index("config:") :], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"There is no score luck .*; there are .*test_accuracy"):
        reproduce(read_table(str(other)), tmp_path, [], print)


def test_a_damaged_plan_is_named(path, tmp_path):
    for text, message in (("{", "is not valid JSON"), ("{}", "is damaged; choose another --output")):
        (tmp_path / "plan.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"plan\.json {message}"):
            reproduce(read_table(str(path)), tmp_path, [], print)


def test_a_mistake_in_the_options_does_not_spoil_the_folder(path, tmp_path):
    table = read_table(str(path))
    with pytest.raises(ConfigError, match=r"There is no option trainer\.max_epoch"):
        reproduce(table, tmp_path, ["--trainer.max_epoch", "1"], print)
    with pytest.raises(KeyboardInterrupt):
        reproduce(table, tmp_path, [], stop)


def test_the_list_counts_the_scores_of_the_folder_that_it_is_given(capsys, tmp_path):
    run = tmp_path / "small" / "opteq-table5" / "alpha-0.8-seed0"
    run.mkdir(parents=True)
    (run / "scores.json").write_text('{"test_accuracy": 0.5}', encoding="utf-8")
    assert main(["reproduce", "--list", "--output", str(tmp_path)]) == 0
    assert "small 1 of 36 trainings; full 0 of 40 trainings" in capsys.readouterr().out


def test_tables_are_listed(capsys):
    assert main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "opteq-table5" in listed
    assert "full 0 of 40 trainings" in listed
    assert main(["reproduce", "--list", "--trainer.max_epochs=1"]) == 2
    assert "Name the table that --trainer.max_epochs=1 is for" in capsys.readouterr().err


def test_a_run_that_another_table_has_trained_alike_is_taken_from_there(path, tmp_path, capsys):
    options = ["--data.batch_size", "32"]
    reproduce(read_table(str(path)), tmp_path / "first", options, print)
    capsys.readouterr()
    other = path.with_name("second.yaml")
    changed = TABLE.replace("max_norm: 0.5", "max_norm: 0.6").replace("name: one", "name: uno")
    changed = changed.replace("reference: one", "reference: uno").replace("0.97: one", "0.97: uno")
    other.write_text(changed, encoding="utf-8")
    reproduce(read_table(str(other)), tmp_path / "second", options, print)
    said = capsys.readouterr().out
    assert re.search(r"\[1/2\] uno, seed 0: test_accuracy [\d.]+ \(of first, trained alike\); ", said)
    assert "tight" in said.split("trained alike")[1]
    assert "trained alike" not in said.split("[2/2]")[1]
    weights = [tmp_path / run / "model.safetensors" for run in ("first/one-seed0", "second/uno-seed0")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    scores = json.loads((tmp_path / "second" / "uno-seed0" / "scores.json").read_text())
    assert scores["parameters"] == json.loads(weights[0].with_name("scores.json").read_text())["parameters"]

    # Other options are another training.
    reproduce(read_table(str(other)), tmp_path / "third", ["--data.batch_size", "16"], print)
    assert "trained alike" not in capsys.readouterr().out
