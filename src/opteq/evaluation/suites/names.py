"""What evaluations there are, and what is asked of them; known without the time that running them takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from opteq.errors import ConfigError
from opteq.spelling import did_you_mean

if TYPE_CHECKING:
    from opteq.data.facts import Task


class Suite(NamedTuple):
    """The options that an evaluation has, and what it is for; None for all."""

    options: tuple[str, ...] = ()
    task: Task | None = "classification"


SUITES = {
    "corruptions": Suite(("corrupted",)),
    "attacks": Suite(("epsilons", "restarts", "autoattack")),
    "ood": Suite(("unknown",)),
    "subclasses": Suite(),
    "saliency": Suite(),
    "equilibrium": Suite(task=None),
    "segmentation": Suite(task="segmentation"),
}


def suite_names(text: str) -> list[str]:
    """The suites in a list like `corruptions,attacks`.

    Raises:
        ConfigError: if there is no suite of a name.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SUITES:
            hint = did_you_mean(name, SUITES, f"suites are {', '.join(SUITES)}.")
            raise ConfigError(f"There is no suite {name!r}; {hint}")
    return list(dict.fromkeys(names))
