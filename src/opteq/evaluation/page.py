"""The parts of a self-contained HTML page. Every text that comes in is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure

from opteq.plots.style import to_element

_CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #111827;
  --soft: #5b6472; --line: #e2e5ea; --accent: #0072b2; --shade: #11182755; }
/* Paper is white: what is printed keeps the colours of the light. */
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --card: #1d2127; --ink: #eceff4; --soft: #a3acba; --line: #333a44;
    --accent: #6cb8e6; --text: #eceff4; --label: #c3cad5; --frame: #6b7583; --grid: #333a44; --grey: #a3acba;
    --blue: #5aaee0; --right: #3fc79b; --wrong: #f08c4b; --shade: #eceff466; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 4px; }
p { margin: 4px 0 14px; max-width: 76ch; color: var(--soft); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin: 24px 0 0; padding: 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 2px 0 0; font-size: 20px; font-weight: 650; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
/* The first number is what a reader looks for. */
.tiles div:first-child { grid-column: span 2; grid-row: span 2; display: flex; flex-direction: column;
  justify-content: center; }
.tiles div:first-child dd { font-size: 40px; line-height: 1.2; }
dd small { display: block; color: var(--soft); font-size: 13px; font-weight: 400; line-height: 1.4;
  white-space: normal; }
.row { display: flex; flex-wrap: wrap; gap: 0 16px; align-items: flex-start; }
figure { flex: 0 1 auto; min-width: 0; margin: 16px 0 0; padding: 14px 16px; background: var(--card);
  color: var(--soft); border: 1px solid var(--line); border-radius: 10px; }
.pictures { display: flex; flex-wrap: wrap; justify-content: space-evenly; }
figure svg { display: block; max-width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { font-size: 13px; margin-top: 8px; max-width: 90ch; }
/* On a phone the text of a wide picture would shrink beyond reading: it scrolls by itself instead. */
@media (max-width: 640px) {
  .tiles div:not(:first-child) dd { font-size: 17px; }
  main { padding: 24px 14px 40px; }
  .row { flex-direction: column; align-items: stretch; }
  .row > * { max-width: 100%; }
  figure.wide { overflow-x: auto; }
  figure.wide .pictures { justify-content: start; }
  figure.wide svg { max-width: none; flex: none; }
  figure.wide figcaption { position: sticky; left: 0; } }
/* A caption in a row takes the width of its picture instead of widening the card. */
.row figcaption { width: 0; min-width: 100%; }
/* A shade at the side where what scrolls goes on, too narrow to lie on what is read there; what moves along
   covers it at the ends. */
.table, figure.wide { background:
    linear-gradient(to right, var(--card) 40%, transparent) left / 30px 100% local,
    linear-gradient(to left, var(--card) 40%, transparent) right / 30px 100% local,
    linear-gradient(to right, var(--shade), transparent) left / 10px 100% scroll,
    linear-gradient(to left, var(--shade), transparent) right / 10px 100% scroll,
    var(--card); background-repeat: no-repeat; }
.table { width: fit-content; max-width: 100%; overflow-x: auto; margin: 16px 0 0;
  padding: 10px 16px 12px; border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
h3 { font-size: 13px; margin: 0 0 4px; }
th, td { padding: 3px 0 3px 18px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 400; }
@media (max-width: 640px) { .table { width: auto; } th, td { padding-left: 11px; } }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td:first-child { white-space: normal; min-width: 8em; }
@media (max-width: 640px) { td:first-child { min-width: 6em; } }
.facts td { text-align: left; white-space: normal; }
/* Lines break between these, not at hyphens, and within one only if it does not fit. */
.facts span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
tbody tr + tr td, thead + tbody td { border-top: 1px solid var(--line); }
.missing { margin-top: 16px; border-left: 4px solid #d55e00; padding: 4px 14px; color: var(--ink); }
details { margin-top: 44px; }
summary { cursor: pointer; font-weight: 650; }
pre { overflow-x: auto; padding: 14px 16px; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; font-size: 13px; line-height: 1.45; }
footer { margin-top: 44px; border-top: 1px solid var(--line); padding-top: 10px;
  color: var(--soft); font-size: 13px; }
@media print {
  :root { --paper: #ffffff; --card: #ffffff; --ink: #000000; --soft: #444444; --line: #cccccc; }
  main { max-width: none; padding: 0; }
  figure, .tiles div, .table { break-inside: avoid; }
  h2, h2 + p { break-after: avoid; }
  details { display: none; } }
"""


# Pixels from which a picture no longer fits a phone at a size that can be read.
_PHONE = 420
# Where a line of facts may break, and what stands there: before an option of a command or, if it does not fit
# with its value, between words, or else behind the dots and slashes of one, but not within a number.
_BREAKS = ((" (?=--)", " "), (" ", " "), (r"(?<=[./])(?!\d)", ""))


def page(title: str, subtitle: str, parts: Iterable[str], footer: str) -> str:
    """A whole document around `parts`, which are HTML already."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
{"".join(parts)}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""


def section(heading: str, explanation: str, *parts: str) -> str:
    """A headed section around `parts`, which are HTML already."""
    head = f"<h2>{escape(heading)}</h2>\n"
    if explanation:
        head += f"<p>{escape(explanation)}</p>\n"
    return f"<section>\n{head}{''.join(parts)}</section>\n"


def tiles(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Headline numbers: a name, a value, and what there is to say of it in small letters, if anything."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        f"{note and f'<small>{escape(note)}</small>'}</dd></div>\n"
        for name, value, note in numbers
    )
    return f'<dl class="tiles">\n{cells}</dl>\n'


def image(figures: Figure | Sequence[Figure], description: str) -> str:
    """A figure, or some beside one another, part of the page and in its colours; with its caption."""
    figures = [figures] if isinstance(figures, Figure) else figures
    text = escape(description)
    pictures = [
        to_element(figure).replace("<svg", f'<svg role="img" aria-label="{text}"', 1) for figure in figures
    ]
    # A CSS inch has 96 pixels.
    kind = ' class="wide"' if max(figure.get_figwidth() for figure in figures) * 96 > _PHONE else ""
    return (
        f'<figure{kind}><div class="pictures">{"".join(pictures)}</div>'
        f"<figcaption>{text}</figcaption></figure>\n"
    )


def side_by_side(*parts: str) -> str:
    """Put `parts` in a row where the page is wide enough."""
    return f'<div class="row">\n{"".join(parts)}</div>\n'


def table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows of texts under a header, names first; it scrolls by itself where the page is narrow."""

    def line(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"

    header = list(header)
    head = f"<thead>{line('th', header)}</thead>\n" if any(header) else ""
    body = "".join(line("td", row) for row in rows)
    return f'<div class="table"><h3>{escape(title)}</h3>\n<table>{head}<tbody>{body}</tbody></table></div>\n'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with what there is to say of each, in lines that wrap."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{_whole(text)}</td></tr>\n" for name, text in pairs)
    return f'<div class="table facts"><table><tbody>{rows}</tbody></table></div>\n'


def _whole(text: str, breaks: Sequence[tuple[str, str]] = _BREAKS) -> str:
    """A text in pieces within pieces, each of which stays whole where it fits."""
    if not breaks:
        return escape(text)
    (place, between), *finer = breaks
    return between.join(f"<span>{_whole(piece, finer)}</span>" for piece in re.split(place, text))


def missing(explanation: str) -> str:
    """Say which part is missing, and why."""
    return f'<p class="missing">{escape(explanation)}</p>\n'


def folded(heading: str, text: str) -> str:
    """Preformatted text that unfolds on a click."""
    return f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>\n"
