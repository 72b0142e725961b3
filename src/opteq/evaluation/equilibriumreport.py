"""What an equilibrium is worth, as tables, as a section of the report and as files."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from matplotlib.figure import Figure

from opteq.evaluation.equilibriumstudy import EquilibriumRecord, KernelRecord, LayerRecord
from opteq.evaluation.page import image, section, side_by_side, table
from opteq.evaluation.paired import Difference
from opteq.evaluation.stored import plain
from opteq.evaluation.table import Table
from opteq.plots.worth import draw_accuracy, draw_residuals, draw_spectra, draw_units
from opteq.results import residual_text

JSON = "equilibrium.json"
_INTERVAL = " (mean difference, 95 % interval of Student's t)"


def tables(record: EquilibriumRecord) -> list[Table]:
    """The numbers of a record."""
    found = [_iterations(record)]
    for layer in record.layers:
        found += [_units(layer), *([_kernels(layer)] if layer.kernels else [])]
    return [t for t in [*found, _sizes(record)] if t.rows]


def worth(record: EquilibriumRecord) -> str:
    """The section of the report."""
    explanation = (
        f"With one evaluation of the map in place of every equilibrium {record.accuracy[0]:.2%} of the"
        f" answers on {record.samples:,} test images are right, with the equilibrium"
        f" {record.full_accuracy:.2%}: {_gain(record.gains[0])}."
    )
    pictures = [image(figure, text) for _, figure, text in figures(record)]
    numbers = [table(t.title, t.header, t.rows) for t in tables(record)]
    return section(
        "What the equilibrium is worth", explanation, side_by_side(*pictures), side_by_side(*numbers)
    )


def _gain(gain: Difference) -> str:
    """What iterating to the end does to the accuracy, and whether so many images decide it."""
    points = _points(gain).lstrip("+-")
    interval = _INTERVAL if "±" in points else ""
    if float(f"{100 * gain.mean:.2f}") == 0:
        difference = f", a difference of {points} percentage points{interval}" if interval else ""
        return f"as many, iterated to the end or not{difference}"
    images = f"{gain.pairs:,} images do" if gain.pairs > 1 else "one image does"
    undecided = "" if gain.decided else f", which {images} not decide"
    way = "gains" if gain.mean > 0 else "loses"
    return f"iterating to the end {way} {points} percentage points{undecided}{interval}"


def _points(gain: Difference) -> str:
    # Images that are all answered alike say nothing of how others would be.
    return gain.text(100, ".2f") if gain.half_width else f"{100 * gain.mean:+.2f}"


def _gain_cell(gain: Difference) -> str:
    points = _points(gain)
    return points if "±" in points else f"{points} ± –"


def as_json(record: EquilibriumRecord) -> dict[str, Any]:
    """The record in plain values; numbers that are not known are null."""
    content = asdict(record)
    for layer, values in zip(record.layers, content["layers"], strict=True):
        for kernel, own in zip(layer.kernels, values["kernels"], strict=True):
            own |= {name: getattr(kernel, name) for name in _DERIVED}
    return plain(content)


_DERIVED = ("norm", "remark1", "remark2", "generalization", "lipschitz")


def figures(record: EquilibriumRecord) -> list[tuple[str, Figure, str]]:
    """The pictures: what they are called, and their captions."""
    accuracy = "Accuracy with K plain iterations z ← T(z) in place of the equilibrium."
    residual = (
        "Relative residual along the plain iteration in the precision that the network has: median over the"
        " test images, and the range between the 10th and the 90th percentile."
    )
    found = [
        ("accuracy", draw_accuracy(record), accuracy),
        ("residual", draw_residuals(record.layers), residual),
    ]
    for layer in record.layers:
        several = len(record.layers) > 1
        name, where = (f"-{layer.name}", f" of {layer.name}") if several else ("", "")
        if layer.spectra:
            text = f"Singular values of the operators{where} as they act on images of this size"
            if any(spectrum.kind == "estimate" for spectrum in layer.spectra):
                text += "; dashed: estimated by stochastic Lanczos quadrature"
            if layer.kernels:
                text += "; dotted: of the projections of patches"
            found.append((f"spectra{name}", draw_spectra(layer), f"{text}."))
        if len(layer.active) > 1 or layer.alpha:
            text = f"Share of the units{where} with a slope σ'(a) ≠ 0 at the equilibrium"
            text += ", and the weights α of the skip connections." if layer.alpha else "."
            found.append((f"units{name}", draw_units(layer), text))
    return found


def _iterations(record: EquilibriumRecord) -> Table:
    rows = [["accuracy", *(f"{a:.2%}" for a in (*record.accuracy, record.full_accuracy))]]
    rows.append(["gain of z*, points ± 95 %", *map(_gain_cell, record.gains), ""])
    for layer in record.layers:
        name = f"residual of {layer.name}" if len(record.layers) > 1 else "residual, median"
        rows.append([name, *(residual_text(layer.residual[1, k]) for k in record.steps), ""])
    header = ["iterations K", *map(str, record.steps), "z*"]
    return Table(f"Accuracy without the equilibrium, {record.samples:,} test images", header, rows)


def _units(layer: LayerRecord) -> Table:
    rows = []
    # W_h have no unit of their own.
    units = zip_longest(layer.operators, layer.spectra, layer.active, layer.alpha)
    for place, (name, spectrum, active, alpha) in enumerate(units, start=1):
        values = ["", "", "", ""]
        if spectrum is not None:
            sizes = f"{math.prod(spectrum.domain):,} → {math.prod(spectrum.codomain):,}"
            known = "" if spectrum.kind == "exact" else "≈ "
            values = [sizes, *(f"{known}{v:.3f}" for v in (spectrum.largest, spectrum.above(0.5)))]
            values.append(f"{known}{spectrum.above(1.0):.3f}")
        rows.append(
            [
                name or f"unit {place}",
                *values,
                "" if active is None else f"{active:.1%}",
                "" if alpha is None else f"{alpha:.3f}",
            ]
        )
    header = ["operator", "numbers", "largest σ", "median σ", "smallest σ", "active units", "α"]
    return _without_empty(Table(f"Operators of {_title(layer)}", header, rows))


def _sizes(record: EquilibriumRecord) -> Table:
    rows = []
    for layer in record.layers:
        where = f" of {layer.name}" if len(record.layers) > 1 else ""
        rows.append([f"input ‖x‖{where}", "", *(f"{v:.3g}" for v in layer.input_norm), ""])
        norms = [f"{v:.3g}" for v in layer.output_norm]
        scales = [f"{v:.3g}" for v in layer.scale]
        channels = [f"{_number(effective)} of {count}" for count, effective in layer.channels]
        read = "equilibrium z*" if layer.symbol == "z" else f"hidden variable {layer.symbol}*"
        if len(scales) == 1:
            rows.append([f"{read}{where}", *scales, *norms, *channels])
        else:
            rows.append([f"{read}{where}", "", *norms, ""])
            branches = enumerate(zip(scales, channels, strict=True), start=1)
            rows += [[f"branch {i}{where}", scale, "", "", shown] for i, (scale, shown) in branches]
    if math.isfinite(record.head_scale):
        rows.append(["features at the last linear layer", f"{record.head_scale:.3g}", "", "", ""])
    header = ["", "root mean square", "median norm", "largest norm", "effective channels"]
    return Table("Sizes", header, rows)


def _kernels(layer: LayerRecord) -> Table:
    def column(kernel: KernelRecord) -> list[str]:
        gaussian, weights, unit = kernel.generalization
        geq, opteq = kernel.lipschitz
        return [
            *(f"{v:.3g}" for v in (kernel.largest_weight, math.sqrt(kernel.gamma), kernel.W_norm**2)),
            *map(_number, (kernel.norm, kernel.U_norm, kernel.bias_norm, kernel.classifier_norm)),
            f"{kernel.size:.3g}",
            *map(_number, (gaussian, weights, unit)),
            "yes" if kernel.remark1 else "no",
            *map(_number, (geq, opteq)),
            "yes" if kernel.remark2 else "no",
        ]

    names = [
        "β_max, largest weight of a patch",
        "√γ, largest",
        "m = ‖WᵀW‖",
        "μ, largest of the norms",
        "‖U‖",
        "‖b‖",
        "‖W_c‖ of the last linear layer",
        "B, largest ‖x‖ or ‖y*‖",
        "β_max μ/(1 - β_max m)",
        "(2μβ_max + 1)/(1 - β_max m)",
        "1/(1 - m)",
        "Remark 1 applies: β_max < 0.8, 0.9 < μ, m < 1",
        "L_geq",
        "L_opteq",
        "Remark 2 applies: β_max < 0.8, B < 1, √γ < 0.2",
    ]
    columns = [column(kernel) for kernel in layer.kernels]
    header = ["", *(f"kernel {i}" if len(columns) > 1 else "" for i in range(1, len(columns) + 1))]
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return Table(f"Remarks 1 and 2 of Li et al. 2023 for {_title(layer)}", header, rows)


def _title(layer: LayerRecord) -> str:
    return f"{layer.name} ({layer.map})" if layer.name else layer.map


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def _without_empty(table: Table) -> Table:
    """The table without the columns in which there is nothing."""
    kept = [place for place in range(len(table.header)) if any(row[place] for row in table.rows)]
    return Table(table.title, [table.header[i] for i in kept], [[row[i] for i in kept] for row in table.rows])
