"""Results as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.contenders import OURS
from benchmarks.table import CellResult, Row
from benchmarks.targets import Verdict

TABLE_NOTES = """\
Times are medians over interleaved runs. A step is a forward and a backward pass, from the input and the
parameters to their gradients. Where several memory layouts are possible every contender ran in each,
and the faster is shown. Evaluations are those of the map in the forward solve + products with its
Jacobian in the backward pass. Before them opteq takes T(0), which the bare operators include; torchdeq
evaluates the map once more (phantom: five times) to attach the gradient, which is in its times. The
residual is the largest of a sample and the gradient error the largest of a leaf, both relative and
against float64. Peak memory is what PyTorch's allocator held at most during a step beyond inputs and
parameters; the compiled code has up to a megabyte besides for each thread. The norm of `W` is that of
the operator with its padding, found by a Lanczos iteration in float64. "Norm watched" adds the library's
own estimate of that norm to every step, "PyTorch alone" leaves out its compiled code. The process keeps
the memory that it frees (`opteq.keep_freed_memory`), for all contenders alike. TF32 is off.
"""

CURVE_NOTES = """\
Each point is one training step of opteq, of torchdeq with its implicit gradient to the same tolerances, and
of the bare operators for as many evaluations as opteq makes; medians over interleaved runs.
"""


def write(folder: Path, name: str, markdown: str, data: dict[str, Any]) -> None:
    """Write `name.md` and `name.json`, and print the former."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(markdown)
    print(f"Written to {folder / name}.md and .json.")


def heading(title: str, command: str, facts: dict[str, str]) -> str:
    """Title, the command that was run, and what it ran on."""
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return f"# {title}\n\n`{command}`\n\n{lines}\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column left-aligned and the others right-aligned."""
    lines = [columns, [":--", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell_markdown(result: CellResult) -> str:
    """The table of one cell, fastest first."""
    columns = (
        "contender", "layout", "forward ms", "backward ms", "step ms", "step / ours", "evaluations",
        "residual", "gradient error", "peak MB",
    )  # fmt: skip
    ours = result.rows[OURS]
    ordered = sorted(result.rows.values(), key=lambda row: row.step)
    table = markdown_table(columns, (_entries(row, ours) for row in ordered))
    active = f"{result.active:.0%} of the units are active"
    return f"## {result.cell.name}\n\n{result.cell.title}; {active}.\n\n{table}"


def verdicts_markdown(verdicts: Sequence[Verdict]) -> str:
    """Every target beside what was measured."""
    outcome = {True: "reached", False: "**missed**"}
    rows = ((v.cell, v.quantity, v.measured, v.target, outcome[v.passed]) for v in verdicts)
    reached = sum(v.passed for v in verdicts)
    table = markdown_table(("cell", "quantity", "measured", "target", ""), rows)
    return f"## Targets: {reached} of {len(verdicts)} reached\n\n{table}"


def results_data(results: Sequence[CellResult]) -> dict[str, Any]:
    """The cells as JSON takes them; times and memory in seconds and bytes."""
    return {
        "cells": [
            {
                "name": result.cell.name,
                "title": result.cell.title,
                "active": result.active,
                "contenders": [asdict(row) for row in result.rows.values()],
                "flatness": asdict(result.flatness),
            }
            for result in results
        ]
    }


def _entries(row: Row, ours: Row) -> tuple[str, ...]:
    quality = ("–", "–", "–")
    if row.quality:
        q = row.quality
        quality = (f"{q.residual:.1e}", f"{q.gradient_error:.1e}", f"{q.memory / 1e6:.1f}")
    return (
        row.name,
        row.layout.replace("_", " "),
        f"{1e3 * row.forward:.1f}",
        f"{1e3 * row.backward:.1f}",
        f"{1e3 * row.step:.1f}",
        f"{row.step / ours.step:.2f}",
        "{} + {}".format(*row.evaluations),
        *quality,
    )
