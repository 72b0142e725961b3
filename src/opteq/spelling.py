"""What a name that there is not may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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
