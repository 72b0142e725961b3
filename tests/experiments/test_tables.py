import pytest

from opteq.errors import ConfigError
from opteq.experiments.tables import read_table, run_name, scales_of, table_names, trainings
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
    assert a.config_of(1)["model"]["network"]["init_args"]["alpha"] == 1
    changed = b.config_of(3)
    assert changed["model"]["network"] == {"class_path": "x", "init_args": {"alpha": 0.5}}
    assert changed["data"] == {"train_limit": 8}
    assert changed["seed_everything"] == 3


def test_every_row_is_trained_once_before_any_second_seed(tmp_path):
    table = read_table(written(tmp_path, SMALL))
    assert [run_name(row, seed) for row, seed in trainings(table)] == ["a-seed0", "b-seed0", "a-seed1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: a", "reference: c", "the reference, curves and claims to be of rows, got c"),
        ("reference: a", "reference: a\ncurves: {x: {1: a, 2: d}}", "to be of rows, got d"),
        ("{name: b,", "{name: A!,", "differ in letters"),
        ("title: A table", "titel: A table", "Table has no option 'titel'; it has name, title"),
        ("name: a, seeds", "name: a, sedes", "A row has no 'sedes'; it has name, changes, seeds"),
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
    with pytest.raises(ConfigError, match="alpha is 1 and has no options"):
        read_table(written(tmp_path, text))


def test_an_unknown_table_is_answered_with_its_likely_name():
    with pytest.raises(ConfigError, match=r"did you mean .*opteq-table5"):
        read_table("opteq-tabel5")


SCALED = """
title: A table
source: A paper
reference: a
config: {model: {x: 1, y: 1}}
scales:
  small: {setting: few, seeds: 2, config: {model: {y: 2}}, by_seed: {data.fold: [[1], [2]]}}
  full: {setting: many, config: {base: digits}, columns: [parameters]}
rows:
  - name: a
    changes: {model.z: 0}
    small: {model.x: 3}
    full: {base: cifar10-small}
    published: {test_accuracy: 0.5}
  - {name: b, only: full}
claims: [{better: a, worse: a, score: parameters}]
"""


def test_a_scale_has_its_own_settings_rows_and_base(tmp_path):
    path = written(tmp_path, SCALED)
    small, full = read_table(path), read_table(path, "full")
    assert [(row.name, row.seeds) for row in small.rows] == [("a", 2)]
    expected = {"model": {"x": 3, "y": 2, "z": 0}, "data": {"fold": [2]}, "seed_everything": 1}
    assert small.rows[0].config_of(1) == expected
    assert (small.setting, small.paper) == ("few", "many")
    assert [(row.name, row.seeds) for row in full.rows] == [("a", 1), ("b", 1)]
    of_a, of_b = (row.config_of(0) for row in full.rows)
    assert (of_a["model"]["z"], of_a["trainer"]["max_epochs"]) == (0, 20)
    assert of_b["data"]["class_path"] == "opteq.data.digits.Digits"
    assert full.columns == ["parameters"]
    assert scales_of(path) == ["smoke", "small", "full"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("claims: [{better: a,", "claims: [{better: c,", "claims to be of rows, got c"),
        ("claims: [{better", "claims: [{best", "Claim has no option 'best'"),
        ("[[1], [2]]", "[[1]]", "`by_seed` of Row to be a mapping of options to lists of 2 values"),
        ("small: {setting", "tiny: {setting", "`scales` of .* to be a mapping of small, full or both"),
        ("published: {test_accuracy: 0.5}", "published: 0.5", "`published` of Row to be a mapping of scores"),
        ("small: {model.x: 3}", "small: 3", "rows and their changes to be mappings, got 3"),
        ("{name: b, only: full}", "b", "rows and their changes to be mappings, got 'b'"),
    ],
)
def test_faulty_scales_and_claims_are_refused(tmp_path, old, new, message):
    assert old in SCALED
    with pytest.raises(ConfigError, match=message):
        read_table(written(tmp_path, SCALED.replace(old, new)))


def test_a_row_of_another_scale_without_a_name_is_refused_at_that_scale(tmp_path):
    path = written(tmp_path, SCALED.replace("{name: b, only: full}", "{only: full}"))
    assert [row.name for row in read_table(path).rows] == ["a"]
    with pytest.raises(ConfigError, match="missing 1 required positional argument: 'name'"):
        read_table(path, "full")


def test_a_scale_that_a_table_has_not_is_answered_with_those_it_has(tmp_path):
    with pytest.raises(ConfigError, match=r"has no scale full; it has smoke, small"):
        read_table(written(tmp_path, SMALL), "full")
    with pytest.raises(ConfigError, match=r"`scale` to be one of smoke, small, full"):
        read_table(written(tmp_path, SMALL), "tiny")


def both_scales():
    return [(name, scale) for name in table_names() for scale in scales_of(name) if scale != "smoke"]


@pytest.mark.parametrize(("name", "scale"), both_scales())
def test_every_row_names_what_a_training_needs(name, scale):
    table = read_table(name, scale)
    for row in table.rows:
        assert row.config.keys() == {"model", "data", "trainer"}
    assert len({str(row.config) for row in table.rows}) == len(table.rows)


# What is shown beside others' numbers is as large as theirs; ("full", row) in a table -> the paper's count.
COUNTS = [
    ("opteq-table3a", "alpha 0.8", 199e3),
    ("opteq-table3a", "DNN", 199e3),
    ("opteq-table4", "deep OptEq of 1.4M, R* decorrelation", 1.4e6),
    ("opteq-table9", "explicit residual network", 26e6),
    ("opteq-table9", "OptEq, implicit", 18e6),
    ("opteq-table9", "MDEQ", 18e6),
    ("mopteq-table4", "HRNet", 13e6),
    ("mopteq-table4", "residual network", 13e6),
    ("geq-table2a", "ResNet-50", 23e6),
    ("kerdeq-table3", "KerDEQ", 8e6),
]


@pytest.mark.parametrize(("name", "row", "printed"), COUNTS)
def test_the_networks_of_full_tables_have_the_printed_sizes(name, row, printed):
    if row == "HRNet":
        pytest.importorskip("timm")
    (found,) = (r for r in read_table(name, "full").rows if r.name == row)
    parameters = sum(p.numel() for p in network_of(found.config_of(0)).parameters())
    assert parameters == pytest.approx(printed, rel=0.11)


def test_every_table_is_run_on_noise():
    from tests.experiments import test_smoke_kernels, test_smoke_mopteq, test_smoke_opteq, test_smoke_others

    modules = (test_smoke_kernels, test_smoke_mopteq, test_smoke_opteq, test_smoke_others)
    run = [m.test_every_table_trains_and_is_measured.pytestmark[0].args[1] for m in modules]
    assert sorted(name for names in run for name in names) == table_names()
