"""What the options of `opteq test` say about suites."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from opteq.errors import ConfigError
from opteq.evaluation.suites.names import SUITES, suite_names

if TYPE_CHECKING:
    from opteq.evaluation.suites.case import SuiteOptions


class SuiteChoice(NamedTuple):
    """The suites to run, and what was chosen of them."""

    names: list[str]
    options: SuiteOptions


def choose_suites(options: Any) -> SuiteChoice | None:
    """The suites that options of `opteq test` ask for; None where they ask for the test itself.

    Raises:
        ConfigError: A suite is not known, a value does not fit, or an option is of no suite that was chosen.
    """
    given = {
        name: value for name, option in _OPTIONS.items() if (value := getattr(options, option)) is not None
    }
    if options.suite is None:
        if given:
            raise ConfigError(
                f"--{_OPTIONS[next(iter(given))]} is an option of suites: choose some by --suite."
            )
        return None
    # Drawing takes a second to import, which the test itself does without.
    from opteq.evaluation.suites.case import SuiteOptions

    names = suite_names(options.suite)
    for name in given:
        if name != "images" and not any(name in SUITES[suite].options for suite in names):
            of = [suite for suite, entry in SUITES.items() if name in entry.options]
            raise ConfigError(f"--{name} is an option of the suite {of[0]}, which --suite does not name.")
    if "epsilons" in given:
        given["epsilons"] = _sizes(given["epsilons"])
    for name in ("images", "restarts"):
        if name in given and given[name] < 1:
            raise ConfigError(f"Expected --{_OPTIONS[name]} of at least 1, got {given[name]}.")
    return SuiteChoice(names, SuiteOptions(**given))


_OPTIONS = {"images": "suite_images"} | {n: n for n in ("corrupted", "unknown", "epsilons", "restarts")}


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(Fraction(size.strip())) for size in text.split(",")]
    except (ValueError, ZeroDivisionError):
        sizes = []
    if not sizes or not all(0 < size <= 1 for size in sizes):
        raise ConfigError(
            f"Expected --epsilons to be sizes above 0 and up to 1, such as 1/255,0.03, got {text!r}."
        )
    return sizes
