"""Long evaluations in parts, so that an interruption costs one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

from opteq.evaluation.stored import plain
from opteq.system.files import read_json, write_json
from opteq.system.progress import Progress, follow

T = TypeVar("T")


class Parts:
    """Measures the parts of an evaluation, and tells how far it is where that takes more than ten seconds.

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
        self._progress: Progress | None = None
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
        with Progress("", len(missing)) as self._progress:
            for done, name in enumerate(missing, start=1):
                self._progress.what = name
                known[name] = take(name)
                self._progress.advance(done - self._progress.done)
                self.write()
        self._progress = None
        return {name: known[name] for name in names}

    def follow(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, told of as they are done; within a part as shares of it."""
        progress, count = self._progress, length_hint(batches)
        if progress is None:
            yield from follow(batches, "Batches of images")
            return
        for batch in batches:
            yield batch
            progress.advance(1 / count if count else 0)

    def write(self, **more: Any) -> None:
        """Write what is known, and what else is to stand in the file."""
        self.content |= more
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, plain(self.content))
