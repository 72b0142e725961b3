"""The cells: which problems are measured. A new one is an entry here, of a family in `families`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.branches import MultiBranch
from benchmarks.families import Deep, Family, Gaussian, OptEq, Sizes
from benchmarks.operators import Convolution, Matrix


@dataclass(frozen=True)
class Cell:
    """One problem.

    Attributes:
        name: how it is called on the command line.
        family: its equilibrium map.
        sizes: how large it is, and the norm of `W`.
        speedup: how many times faster than torchdeq's implicit step it is asked to be.
        forward_overhead: how many times the bare operators' time its forward solve may take.
        tol: relative tolerance of the forward and of the adjoint solve.
        dtype: floating-point type.
    """

    name: str
    family: Family
    sizes: Sizes
    speedup: float = 2.0
    forward_overhead: float = 1.15
    tol: float = 1e-4
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        """One line that says what is measured."""
        s = self.sizes
        pixels = "".join(f"×{n}" for n in self.family.operator.domain(1, s.size)[1:])
        shape = f"batch {s.batch}, {s.channels}→{s.hidden}{pixels}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family}, {shape}, ‖W‖ = {s.norm:g}, tolerance {self.tol:g}, {dtype}"

    def resized(self, **sizes: float) -> Cell:
        """The same cell with other `Sizes`."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    def shrunk(self) -> Cell:
        """A version that runs in a second, to see whether everything works."""
        return self.resized(batch=2, channels=16, hidden=16, size=8)


_IMAGE = Sizes(batch=32, channels=64, hidden=64, size=16, norm=0.97)
_VECTOR = Sizes(batch=128, channels=512, hidden=512, size=1, norm=0.97)

_OPTEQ = Cell("opteq", OptEq(Convolution(3)), _IMAGE, speedup=1.6)

CELLS = {
    cell.name: cell
    for cell in (
        _OPTEQ,
        replace(_OPTEQ.resized(norm=0.995), name="opteq-0.995"),
        Cell("geq", Gaussian(Convolution(3), patch_channels=8, patch_size=2, patch_hidden=64), _IMAGE),
        Cell("dense", OptEq(Matrix()), _VECTOR),
        Cell(
            "mopteq",
            MultiBranch(Convolution(3)),
            Sizes(batch=16, channels=128, hidden=64, size=32, norm=0.9),
            speedup=1.6,
            forward_overhead=1.25,
        ),
        Cell("deep", Deep(Convolution(3)), replace(_IMAGE, channels=30, hidden=128), speedup=1.6),
    )
}

_BRANCHES, _DEEP = CELLS["mopteq"], CELLS["deep"]


def _branches(n: int) -> Cell:
    family = MultiBranch(Convolution(3), hidden=(64,) * n, reductions=(1, 2, 4, 8)[:n])
    return replace(_BRANCHES.resized(batch=8), family=family)


def _units(n: int) -> Cell:
    return replace(_DEEP, family=Deep(Convolution(3), hidden=(64,) * n))


# The axes of the growth curves: all through the first cell, but for those of branches and of depth.
CURVES: dict[str, dict[float, Cell]] = {
    "batch": {n: _OPTEQ.resized(batch=n) for n in (1, 4, 16, 64, 256)},
    "resolution": {n: _OPTEQ.resized(size=n) for n in (8, 16, 32, 64)},
    "channels": {n: _OPTEQ.resized(channels=n, hidden=n) for n in (16, 32, 64, 128, 256)},
    "branches": {n: _branches(n) for n in (2, 3, 4)},
    "depth": {n: _units(n) for n in (1, 2, 4, 8)},
    # Tolerances below 1e-5 need float64, so all of this curve is in it, on fewer samples.
    "tolerance": {
        10.0**-n: replace(_OPTEQ.resized(batch=4), tol=10.0**-n, dtype=torch.float64) for n in range(2, 9, 2)
    },
    "norm": {norm: _OPTEQ.resized(norm=norm) for norm in (0.9, 0.97, 0.99, 0.997, 0.999)},
    "threads": dict.fromkeys((1, 2), _OPTEQ),
}
