"""How far long work is, once it has taken ten seconds: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from operator import length_hint
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Seconds after which a user wonders how long it will take.
PATIENCE = 10
# Lines for the whole of a long work, beyond which they say little that is new.
_LINES = 20
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"


class Pace:
    """How much of a work is done, and how long the rest takes if it goes on like that.

    Args:
        total: the amount of the work, in any unit; None or 0 if it is not known.

    Attributes:
        done: how much of it is done.
    """

    def __init__(self, total: float | None) -> None:
        self.done, self._total = 0.0, total or None
        self._began = time.monotonic()

    def advance(self, amount: float = 1.0) -> None:
        """Count a part of the work as done."""
        self.done += amount

    @property
    def elapsed(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes; None where that cannot be known."""
        if self._total is None or not self.done:
            return None
        return max(self._total / self.done - 1, 0.0) * self.elapsed

    def __str__(self) -> str:
        took = f"{duration(self.elapsed)} so far"
        if self._total is None or self.left is None:
            return took
        return f"{self.done / self._total:.0%}, {took}, about {duration(self.left)} left"


class Progress(Pace):
    """Tells on stderr how far a work is.

    Where stderr is a terminal that is a bar, which goes at the end. Where it is a pipe or a file it is a line
    every ten seconds, or every twentieth of the work if that takes longer.

    Args:
        what: the work; may be assigned anew.
        total: as for `Pace`.
    """

    def __init__(self, what: str, total: float | None) -> None:
        super().__init__(total)
        self.what, self._next = what, self._began + PATIENCE
        self._bar: tqdm[Any] = tqdm(
            desc=what,
            total=self._total,
            delay=PATIENCE,
            disable=None,
            leave=False,
            bar_format=_BAR if self._total else None,
        )

    def advance(self, amount: float = 1.0) -> None:
        """Count a part of the work as done, and tell of it where it is time to."""
        super().advance(amount)
        if not self._bar.disable:
            self._bar.set_description_str(self.what, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() >= self._next:
            sys.stderr.write(f"{self.what}: {self}\n")
            sys.stderr.flush()
            whole = self.elapsed + (self.left or 0.0)
            self._next = time.monotonic() + max(PATIENCE, whole / _LINES)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def follow(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, while it is told how far they are."""
    with Progress(what, length_hint(items)) as progress:
        for item in items:
            yield item
            progress.advance()


def duration(seconds: float) -> str:
    """Such as `0:42`, `3:07` or `1:02:05`."""
    return tqdm.format_interval(seconds).removeprefix("0")
