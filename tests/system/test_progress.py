"""What long work tells while it is under way."""

import time

import pytest

from opteq.system import progress
from opteq.system.progress import Pace, Progress, duration, follow


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_the_rest_is_estimated_from_what_is_done(clock):
    pace = Pace(40)
    assert pace.left is None
    clock.now += 30
    pace.advance(10)
    assert pace.left == 90
    assert str(pace) == "25%, 0:30 so far, about 1:30 left"
    pace.advance(31)
    assert pace.left == 0


@pytest.mark.parametrize("total", [None, 0])
def test_without_a_total_there_is_no_estimate(clock, total):
    pace = Pace(total)
    clock.now += 30
    pace.advance()
    assert str(pace) == "0:30 so far"


def test_short_work_says_nothing(clock, capsys):
    for _ in follow(range(100), "work"):
        clock.now += 0.09
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_a_line_every_ten_seconds(clock, capsys):
    for _ in follow(range(15), "work"):
        clock.now += 4
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "work: 20%, 0:12 so far, about 0:48 left",
        "work: 40%, 0:24 so far, about 0:36 left",
        "work: 60%, 0:36 so far, about 0:24 left",
        "work: 80%, 0:48 so far, about 0:12 left",
        "work: 100%, 1:00 so far, about 0:00 left",
    ]


def test_long_work_has_a_few_lines_and_no_carriage_return(clock, capsys):
    with Progress("work", 5000) as told:
        for _ in range(5000):
            clock.now += 3
            told.advance()
    written = capsys.readouterr().err
    assert "\r" not in written
    assert 15 <= len(written.splitlines()) <= 22


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0)
    for _ in follow(range(2), "work"):
        time.sleep(0.15)  # tqdm draws no more than ten times a second
    written = capsys.readouterr().err
    assert "\rwork:  50%|" in written
    assert "\n" not in written


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (42, "0:42"), (750, "12:30"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert duration(seconds) == text
