from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_rel

from opteq.experiments.comparison import Column, difference, markdown, verdict
from opteq.experiments.tables import Claim, Row, Table

TABLE = Table(
    name="small",
    title="A table",
    source="A paper",
    rows=(Row("a", {}, 3), Row("b", {}, 3, {"parameters": 1300}), Row("c", {}, 1)),
    reference="a",
    compare="test_accuracy",
    columns=("test_accuracy", "parameters"),
    measure=(),
    curves={},
)


def test_the_interval_is_that_of_the_paired_t_test():
    x, y = np.random.default_rng(0).normal(size=(2, 6))
    found = difference(dict(enumerate(x)), dict(enumerate(y)))
    expected = ttest_rel(x, y).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(expected.low, rel=1e-9)
    assert found.mean + found.half_width == pytest.approx(expected.high, rel=1e-9)


def test_only_common_seeds_are_paired():
    found = difference({0: 1.0, 1: 5.0, 7: 100.0}, {0: 0.0, 1: 2.0, 2: -50.0})
    assert (found.mean, found.pairs) == (2.0, 2)
    assert difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("values", "higher", "lower"),
    [
        ([0.5, 0.51, 0.52], "better", "worse"),
        ([-0.5, -0.51, -0.52], "worse", "better"),
        ([0.5, -0.4, 0.1], "undecided", "undecided"),
        ([0.5], "undecided", "undecided"),
        # The interval is 0 ± 4.303 · 0.01/√3.
        ([0.01, -0.01, 0.0], "smaller than 3 point", "smaller than 3 point"),
    ],
)
def test_a_verdict_needs_an_interval_without_zero_or_within_the_margin(values, higher, lower):
    found = difference(dict(enumerate(values)), dict.fromkeys(range(3), 0.0))
    assert verdict(found, Column("", 100, margin=0.03)) == higher
    assert verdict(found, Column("", 100, higher_is_better=False, margin=0.03)) == lower
    if "smaller" in higher:
        assert verdict(found, Column("", 100, margin=0.0248)) == "undecided"


def test_the_table_shows_means_spread_and_differences():
    def run(accuracy):
        return {"test_accuracy": accuracy, "parameters": 1234}

    scores = {
        "a": {0: run(0.50), 1: run(0.60)},
        "b": {0: run(0.61), 1: run(0.70)},
        "c": {},
    }
    a, b, c = markdown(TABLE, scores).splitlines()[-3:]
    assert a == "| a | 2 | 55.00 ± 7.07 | 1,234 | – | – | reference |"
    # The differences are 11 and 10 points: 10.5 ± 12.706 · 0.5.
    assert b == "| b | 2 | 65.50 ± 6.36 | 1,234 | 1,300 | +10.50 ± 6.35 | better |"
    assert c == "| c | 0 | – | – | – | – | – |"


def test_other_options_are_stated_above_the_table():
    scores = {name: {} for name in "abc"}
    text = markdown(TABLE, scores, ["--data.train_limit", "200"])
    assert "`--data.train_limit 200`" in text.partition("| row |")[0]
    assert "Options" not in markdown(TABLE, scores)


def test_claims_are_judged_and_settings_stated():
    claims = (Claim("b", "a"), Claim("a", "b"), Claim("b", "a", "seconds_train"), Claim("c", "a"))
    table = replace(TABLE, claims=claims, setting="few images", paper="many images")

    def run(accuracy, seconds):
        return {"test_accuracy": accuracy, "seconds_train": seconds}

    scores = {
        "a": {0: run(0.50, 9.0), 1: run(0.60, 8.0)},
        "b": {0: run(0.61, 7.0), 1: run(0.70, 6.0)},
        "c": {},
    }
    text = markdown(table, scores)
    assert "Here: few images.\n\nThe paper: many images.\n" in text
    assert text.splitlines()[-4:] == [
        "| b better than a | accuracy % | +10.50 ± 6.35 | holds |",
        "| a better than b | accuracy % | -10.50 ± 6.35 | contrary |",
        "| b better than a | training s | -2 ± 0 | holds |",
        "| c better than a | accuracy % | – | not run |",
    ]
    assert "The paper:" not in markdown(replace(table, scale="full"), scores)
