import pytest
import torch
from torch.nn import Linear

from opteq.errors import ConfigError
from opteq.experiments.tables import read_table, run_name, table_names, trainings
from tests.networks import network_of

SMALL = """
title: A table
source: A paper
reference: a
config: {model: {network: {class_path: x, init_args: {alpha: 1}}}}
rows:
  - {name: a, seeds: 2}
  - {name: b, changes: {model.network.init_args.alpha: 0.5, data.train_limit: 8}}
"""


def written(tmp_path, text):
    path = tmp_path / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_rows_change_the_common_configuration_and_nothing_else(tmp_path):
    table = read_table(written(tmp_path, SMALL))
    a, b = table.rows
    assert table.config_of(a, 1)["model"]["network"]["init_args"]["alpha"] == 1
    changed = table.config_of(b, 3)
    assert changed["model"]["network"] == {"class_path": "x", "init_args": {"alpha": 0.5}}
    assert changed["data"] == {"train_limit": 8}
    assert changed["seed_everything"] == 3


def test_every_row_is_trained_once_before_any_second_seed(tmp_path):
    table = read_table(written(tmp_path, SMALL))
    assert [run_name(row, seed) for row, seed in trainings(table)] == ["a-seed0", "b-seed0", "a-seed1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: a", "reference: c", "the reference and the curves to be rows, got c"),
        ("reference: a", "reference: a\ncurves: {x: {1: a, 2: d}}", "to be rows, got d"),
        ("{name: b,", "{name: A!,", "differ in letters"),
        ("title: A table", "titel: A table", "Table has no option 'titel'; it has name, title"),
        ("name: a, seeds", "name: a, sedes", "Row has no option 'sedes'; it has name, changes, seeds"),
        ("title: A table\n", "", "missing 1 required positional argument: 'title'"),
        ("title: A table", "title: [", "not valid YAML"),
        ("seeds: 2", "seeds: 0", "`seeds` of Row to be at least 1, got 0"),
        ("seeds: 2", "seeds: x", "`seeds` of Row to be a whole number, got 'x'"),
        ("name: a,", "name: 1,", "`name` of Row to be a string, got 1"),
        ("reference: a", "reference: a\ncurves: [1]", "`curves` of Table to be a mapping of each quantity"),
    ],
)
def test_a_faulty_table_is_refused_with_what_is_wrong(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read_table(written(tmp_path, SMALL.replace(old, new)))


@pytest.mark.parametrize("rows", ["rows:", "rows: []", "rows: {a: 1}"])
def test_a_table_without_rows_is_refused(tmp_path, rows):
    head = SMALL.partition("rows:")[0]
    with pytest.raises(ConfigError, match="at least one row"):
        read_table(written(tmp_path, head + rows))


def test_an_option_of_something_that_has_none_is_refused(tmp_path):
    text = SMALL.replace("model.network.init_args.alpha", "model.network.alpha.beta")
    table = read_table(written(tmp_path, text))
    with pytest.raises(ConfigError, match="alpha is 1 and has no options"):
        table.config_of(table.rows[1], 0)


def test_an_unknown_table_is_answered_with_its_likely_name():
    with pytest.raises(ConfigError, match="did you mean opteq-features"):
        read_table("opteq-feature")


@pytest.mark.parametrize("name", table_names())
def test_the_networks_of_packaged_tables_fit_their_data(name):
    table = read_table(name)
    for row in table.rows:
        config = table.config_of(row, 0)
        classes = config["data"]["init_args"].get("classes")
        *_, last = (m for m in network_of(config).modules() if isinstance(m, Linear | torch.nn.Conv2d))
        expected = 2 if "connected" in config["data"]["class_path"] else 10
        assert last.weight.shape[0] == (expected if classes is None else len(classes))
        assert config.keys() == {"seed_everything", "model", "data", "trainer"}
