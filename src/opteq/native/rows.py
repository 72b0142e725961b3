"""What solvers do with the rows of matrices, one row per sample: in C where it can be, else with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.serving import still_reads


def row_norms(x: Tensor) -> Tensor:
    """`(batch,)` Euclidean norms of the rows, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=1, dtype=wide)


def norms(g: Tensor, f: Tensor) -> Tensor:
    """`(batch, 2)` norms of the rows of `g` and of `f`, in float64."""
    return torch.stack((row_norms(g), row_norms(f)), dim=1).double()


def row_products(p: Tensor, q: Tensor) -> Tensor:
    """`(batch,)` inner products of the rows in float64, without a `(batch, n)` tensor of products."""
    # As a row times a matrix of one row, which runs many times faster than times a column.
    return torch.bmm(p[:, None], q[:, None].mT)[:, 0, 0].double()


def observe(image: Sequence[Tensor], x: Tensor, f: Tensor, g: Tensor, in_c: bool) -> Tensor:
    """Write an image into `f` and its difference to `x` into `g`, and measure both.

    Args:
        image: matrices, side by side as wide as `x`.
        x: `(batch, n)`.
        f: where the image goes.
        g: where the difference goes.
        in_c: whether compiled code `reads` such matrices, asked once for a solve.

    Returns:
        `norms` of `g` and `f`.
    """
    widths = [part.shape[1] for part in image]
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    fits = x.shape == f.shape == g.shape and all(part.shape[0] == x.shape[0] for part in image)
    if in_c and fits and still_reads(*image, x, f, g):
        found = x.new_empty(x.shape[0], 2, dtype=torch.float64)
        whole = widths == [x.shape[1]]
        places = [(x, f, g)] if whole else zip(*(t.split(widths, 1) for t in (x, f, g)), strict=True)
        for k, (part, place) in enumerate(zip(image, places, strict=True)):
            _observe(part, *place, found, k == 0, k == len(image) - 1)
        return found
    for place, part in zip(f.split(widths, 1), image, strict=True):
        place.copy_(part)
    torch.sub(f, x, out=g)
    return norms(g, f)


@operator(
    "rows_observe(Tensor image, Tensor x, Tensor(a!) f, Tensor(b!) g, Tensor(c!) norms, bool first,"
    " bool last) -> ()"
)
def _observe(image: Tensor, x: Tensor, f: Tensor, g: Tensor, *norms: Any) -> None:
    places = (image, image.stride(0), x, x.stride(0), f, f.stride(0), g, g.stride(0))
    call("rows_observe", "PNPNPNPN2NP3i", *places, *x.shape, *norms)


def hold(x: Tensor, following: Tensor, active: Tensor, in_c: bool) -> Tensor:
    """The rows of `following`, in new memory, and those of `x` where a row is no longer active."""
    if in_c and following.shape == x.shape and still_reads(x, following):
        return _hold(x, following, active)
    # Under autocast a map may change the dtype from one iterate to the next.
    return torch.where(active[:, None], following.to(x.dtype), x)


@operator(
    "rows_hold(Tensor x, Tensor following, Tensor active) -> Tensor", lambda x, *_: x.new_empty(*x.shape)
)
def _hold(x: Tensor, following: Tensor, active: Tensor) -> Tensor:
    held = x.new_empty(*x.shape)
    call("rows_hold", "PNPN2P2Ni", x, x.stride(0), following, following.stride(0), active, held, *x.shape)
    return held


def judge(
    norms: Tensor,
    active: Tensor,
    converged: Tensor,
    taken: Tensor,
    step: int,
    scale: float,
    tol: float,
    tiny: float,
    in_c: bool,
) -> tuple[Tensor, int, int]:
    """Enter one evaluation: rows that have reached the tolerance or are no longer finite stop, in place.

    Args:
        norms: `(batch, 2)` of `T(z) - z` and of `T(z)`, in float64.
        active: `(batch,)` which rows go on.
        converged: `(batch,)` which have converged.
        taken: `(batch,)` the step at which a row stopped.
        step: the number of this one.
        scale: factor on residuals.
        tol: relative residual at which a row stops.
        tiny: the least size that residuals are relative to.
        in_c: whether compiled code `takes` tensors, asked once for a solve.

    Returns:
        `(batch,)` relative residuals, NaN for rows that had stopped; the number of rows that go on, and of
        those that are not finite, lately or since long.
    """
    if in_c:
        return _judge(norms, active, converged, taken, step, scale, tol, tiny)
    changes, sizes = norms.unbind(1)
    # Finite is asked of the change: where T(z) = 0 and z is not, the residual is rightly infinite.
    infinite = ~torch.isfinite(changes)
    residuals = scale * changes / sizes.clamp(min=tiny)
    # An image too large for its norm has come nowhere.
    residuals.masked_fill_(sizes.isinf() & ~infinite, torch.inf)
    residuals.masked_fill_(~active, torch.nan)
    reached = residuals <= tol
    stops = active & (reached | infinite)
    converged |= reached
    taken.masked_fill_(stops, step)
    active &= ~stops
    going, lost = torch.stack((active.sum(), infinite.sum())).tolist()
    return residuals, going, lost


@operator(
    "rows_judge(Tensor norms, Tensor(a!) active, Tensor(b!) converged, Tensor(c!) taken, int step,"
    " float scale, float tol, float tiny) -> (Tensor, int, int)"
)
def _judge(norms: Tensor, *others: Any) -> tuple[Tensor, int, int]:
    residuals, (active, converged, taken, *options) = norms.new_empty(norms.shape[0]), others
    kept = (norms, active, converged, taken, residuals, norms.shape[0])
    lost, going = divmod(call("rows_judge", "5PNq3di", *kept, *options), 2**32)
    return residuals, going, lost
