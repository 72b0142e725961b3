"""Long evaluations in parts, so that an interruption costs one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from opteq.evaluation.stored import plain
from opteq.system.files import read_json, write_json

T = TypeVar("T")

# Seconds after which a user wonders how long it will take.
_PATIENCE = 10


class Parts:
    """Measures the parts of an evaluation, with a progress bar where that takes more than ten seconds.

    With a file, every part is written there as soon as it is known, and those are not measured that the file
    holds of the same evaluation.

    Args:
        path: the file; None to keep nothing.
        of: what the evaluation is of, in plain values: with another content the file is begun anew.

    Attributes:
        content: what the file holds, or is to hold.
    """

    def __init__(self, path: Path | None = None, of: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self.content: dict[str, Any] = {**(of or {}), "parts": {}}
        self._bar: tqdm[Any] | None = None
        if path is not None and path.is_file():
            stored = read_json(path)
            if isinstance(stored.get("parts"), dict) and all(
                stored.get(k) == v for k, v in (of or {}).items()
            ):
                self.content = stored

    def measure(self, names: Sequence[str], take: Callable[[str], T]) -> dict[str, T]:
        """`take(name)`, a plain value, for each name that is not known yet; returns it for all."""
        known = self.content["parts"]
        missing = [name for name in names if name not in known]
        # Without a terminal nobody looks at a bar.
        with tqdm(
            total=len(missing), delay=_PATIENCE, disable=None, leave=False, bar_format=_BAR
        ) as self._bar:
            for done, name in enumerate(missing, start=1):
                self._bar.set_description_str(name, refresh=False)
                known[name] = take(name)
                self._bar.update(done - self._bar.n)
                self.write()
        self._bar = None
        return {name: known[name] for name in names}

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, with the bar moving on; outside of parts they have one of their own."""
        count = length_hint(batches)
        if self._bar is None:
            yield from tqdm(batches, total=count or None, delay=_PATIENCE, disable=None, leave=False)
            return
        for batch in batches:
            yield batch
            self._bar.update(1 / count if count else 0)

    def write(self, **more: Any) -> None:
        """Write what is known, and what else is to stand in the file."""
        self.content |= more
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, plain(self.content))


_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
