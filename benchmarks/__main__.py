"""Measurements of opteq against its peers and against the operators themselves."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cells import CELLS, CURVES
from benchmarks.environment import environment
from benchmarks.measure import Deadline
from benchmarks.table import measure_cell
from benchmarks.targets import verdicts
from opteq.errors import OpteqError
from opteq.interrupts import INTERRUPTED
from opteq.system.memory import keep_freed_memory
from opteq.system.progress import Pace


def main(arguments: list[str]) -> None:
    """Parse the command line and run one of the measurements."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["table", *arguments]
    options = _parser().parse_args(arguments)
    options.command = " ".join(["python -m benchmarks", *arguments])
    # TF32 rounds to 11 bits, too coarse for the tolerances that are measured here.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    # For all contenders alike: what is measured is no allocator.
    keep_freed_memory()
    try:
        options.run(options)
    except OpteqError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("Interrupted; nothing was written. The same command starts again.", file=sys.stderr)
        sys.exit(INTERRUPTED)


def run_table(options: argparse.Namespace) -> None:
    """The cells of the table, and the targets."""
    cells = [CELLS[name] for name in options.cells]
    if options.quick:
        cells = [cell.shrunk() for cell in cells]
    results, pace = [], Pace(len(cells))
    for cell in cells:
        _tell(cell.name, pace)
        results.append(measure_cell(cell, options.device, options.runs))
        pace.advance()
    judged = verdicts(results)
    warning = "\n**Shrunken cells: the numbers mean nothing.**\n" if options.quick else ""
    body = [
        report.TABLE_NOTES + warning,
        *map(report.cell_markdown, results),
        report.verdicts_markdown(judged),
    ]
    data = {**report.results_data(results), "targets": [asdict(v) for v in judged]}
    _write(options, "table", "A training step against peers and bare operators", body, data)


def run_floor(options: argparse.Namespace) -> None:
    """What the library's own products take by themselves, in the fewest evaluations."""
    from benchmarks.floor import floor_markdown, measure_floor

    results, pace = [], Pace(len(options.cells))
    for name in options.cells:
        _tell(name, pace)
        results.append(measure_floor(CELLS[name], options.device, options.runs))
        pace.advance()
    data = {"cells": {r.cell.name: {name: asdict(row) for name, row in r.rows.items()} for r in results}}
    _write(options, "floor", "A training step at the very least", [floor_markdown(results)], data)


def run_curves(options: argparse.Namespace) -> None:
    """The growth curves."""
    from benchmarks import curves

    deadline = Deadline(options.seconds)
    measured, pace = {}, Pace(len(options.axes))
    for axis in options.axes:
        _tell(axis, pace)
        if points := curves.measure_curve(axis, options.device, options.runs, deadline):
            measured[axis] = points
        pace.advance()
    judged = curves.verdicts(measured)
    missing = [axis for axis in options.axes if len(measured.get(axis, ())) < len(CURVES[axis])]
    cut = f"\nThe time limit cut short: {', '.join(missing)}.\n" if missing else ""
    body = [
        report.CURVE_NOTES + cut,
        *(curves.curve_markdown(axis, points) for axis, points in measured.items()),
        report.verdicts_markdown(judged),
    ]
    data = {
        "curves": {axis: [asdict(p) for p in points] for axis, points in measured.items()},
        "targets": [asdict(v) for v in judged],
    }
    _write(options, "curves", "Growth curves", body, data)
    curves.save_plot(measured, options.out / "curves.png")


def run_epoch(options: argparse.Namespace) -> None:
    """One epoch of the classifier."""
    from benchmarks.epoch import epoch_markdown, measure_epoch

    result = measure_epoch(options.data, options.device, Deadline(options.seconds))
    _write(options, "epoch", "An epoch of a classifier", [epoch_markdown(result)], asdict(result))


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", type=_device, default="cpu", help="cpu (default) or cuda")
    common.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the results")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, title="measurements (default: table)")

    table = commands.add_parser("table", parents=[common], help="opteq against its peers, cell by cell")
    _add_choice(table, "--cells", CELLS)
    table.add_argument("--runs", type=_positive, default=9, help="timed runs of every contender (9)")
    table.add_argument("--quick", action="store_true", help="shrunken cells, to see that everything works")
    table.set_defaults(run=run_table)

    floor = commands.add_parser("floor", parents=[common], help="what a step takes at the very least")
    _add_choice(floor, "--cells", CELLS)
    floor.add_argument("--runs", type=_positive, default=9, help="timed runs of every contender (9)")
    floor.set_defaults(run=run_floor)

    curves = commands.add_parser("curves", parents=[common], help="growth of time with size and accuracy")
    _add_choice(curves, "--axes", CURVES)
    curves.add_argument("--runs", type=_positive, default=9, help="timed runs of every point (9)")
    curves.add_argument(
        "--seconds", type=_positive, default=1800, help="begin no point after this time (1800)"
    )
    curves.set_defaults(run=run_curves)

    epoch = commands.add_parser("epoch", parents=[common], help="images per second of a classifier")
    epoch.add_argument("--data", required=True, help="folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    epoch.add_argument(
        "--seconds", type=_positive, default=1800, help="stop the epoch after this time (1800)"
    )
    epoch.set_defaults(run=run_epoch)
    return parser


def _add_choice(parser: argparse.ArgumentParser, option: str, choices: dict) -> None:
    names = ", ".join(choices)
    parser.add_argument(option, nargs="+", choices=choices, default=list(choices), metavar="NAME", help=names)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("no CUDA device is available; leave the option out")
    return torch.device(name)


def _tell(name: str, pace: Pace) -> None:
    print(f"measuring {name} … ({pace})", file=sys.stderr, flush=True)


def _write(options: argparse.Namespace, name: str, title: str, body: list[str], data: dict) -> None:
    facts = environment(options.device)
    markdown = "\n".join([report.heading(title, options.command, facts), *body])
    report.write(options.out, name, markdown, {"command": options.command, "environment": facts, **data})


if __name__ == "__main__":
    main(sys.argv[1:])
