"""How results show themselves in a notebook: a small table, and a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from types import ModuleType

from opteq.errors import ConfigError

# No colour of its own, so that it is readable on light and on dark pages.
_CELL = "padding:0.1em 0.8em 0.1em 0;text-align:left;vertical-align:top;background:none"


def html_table(title: str, rows: Mapping[str, str | Sequence[str]]) -> str:
    """A table that needs no style sheet, with a header and one or more cells in each row; text is escaped."""
    lines = "".join(
        f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th>{_cells(values)}</tr>'
        for name, values in rows.items()
    )
    caption = f'<caption style="text-align:left;font-weight:bold;color:inherit">{escape(title)}</caption>'
    return f'<table style="border-collapse:collapse;color:inherit">{caption}<tbody>{lines}</tbody></table>'


def _cells(values: str | Sequence[str]) -> str:
    values = [values] if isinstance(values, str) else values
    return "".join(f'<td style="{_CELL}">{escape(value)}</td>' for value in values)


def pictures() -> ModuleType:
    """What draws the pictures of results.

    Raises:
        ConfigError: if matplotlib is missing, which the layers do without.
    """
    try:
        from opteq.plots import solves
    except ModuleNotFoundError as error:
        raise ConfigError("plot() needs the package matplotlib: pip install matplotlib.") from error
    return solves
