"""What a name that there is not may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


def did_you_mean(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The question whether one of the names most like `name` was meant.

    Args:
        name: what the user wrote.
        known: the names that there are.
        otherwise: what to say where none is like it.
        cutoff: how alike they have to be, from 0 to 1.
    """
    return question(get_close_matches(name, list(known), cutoff=cutoff), otherwise)


def question(names: Sequence[str], otherwise: str) -> str:
    """The question whether one of these was meant, or `otherwise` where there is none."""
    return f"did you mean {' or '.join(names)}?" if names else otherwise


def run_meant(run: str, holds: str, otherwise: str, others: Iterable[str] = ()) -> str:
    """The question whether a folder most like `run` was meant, beside it or, by its name alone, in `runs`.

    Args:
        run: what the user wrote.
        holds: the file that the folder of a run holds.
        otherwise: what to say where none is like it.
        others: further names that could have been meant.
    """
    inside = {path.parent.name: str(path.parent) for path in Path("runs").glob(f"*/{holds}")}
    beside = [str(path.parent) for path in Path(run).parent.glob(f"*/{holds}")]
    known = inside | {name: name for name in (*others, *beside)}
    return question([known[name] for name in get_close_matches(run, known, cutoff=0.8)], otherwise)
