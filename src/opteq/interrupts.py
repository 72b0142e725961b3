"""How the command ends where it is interrupted."""

import sys

INTERRUPTED = 130
"""Its exit status, the one that shells give a program that was interrupted."""


def interrupted(sentence: str = "") -> int:
    """Say on stderr what an interrupt has left, by default nothing; returns `INTERRUPTED`."""
    sys.stderr.write(f"opteq: {sentence or 'Interrupted; the same command starts again.'}\n")
    return INTERRUPTED
