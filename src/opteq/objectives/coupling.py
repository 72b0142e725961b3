"""Heritage and diversity: the objective that couples the branches of a multi-branch model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Gradients
from opteq.errors import ConfigError
from opteq.native.packed import multiply_each
from opteq.objectives.ring import End, Junction, Ring
from opteq.options import require, strict_options
from opteq.results import State, sample_sums, tensors_of
from opteq.tensors.held import HoldsTensors
from opteq.tensors.precision import full_precision
from opteq.tensors.tracing import tracing


@strict_options
@dataclass(frozen=True)
class HeritageDiversity:
    """`λD_τ - H`, summed over neighbours on a ring of branches (Li et al. 2022, Eq. 3 and 4).

    Neighbours `i` and `j = i + 1` (the last one's is the first) meet at the smaller of their sizes: the
    larger one is averaged, which comes to the same as the `P_{i:j}` of the paper. With
    `N_kl = ⟨z_i^(k), P z_j^(l)⟩` between the channels `k` and `l`,

    - heritage `H = Σ_k N_kk` makes corresponding channels alike,
    - diversity `D = Σ_{k≠l} |N_kl|` makes the others unlike.

    The paper's `|N|` makes the map of the model discontinuous, so that in general there is no fixed
    point: minimisers hold some of the `N_kl` at 0, where the sign jumps. `D_τ` has Huber's function in
    its place, `|N| - t/2`, or `N²/2t` for `|N| ≤ t`. Its width `t = tau · mean_i ‖z_i‖²` is taken for each
    sample after one evaluation without coupling, constant during the solve and differentiated through.

    Args:
        weight: `λ ≥ 0`.
        tau: `τ ≥ 0`, relative width of the quadratic part; 0 for the paper's hard sign.
        heritage: whether there is an `H`.
        diversity: whether there is a `λD_τ`.

    Raises:
        ConfigError: for options out of range, or neither heritage nor diversity.
    """

    weight: float = 0.01
    tau: float = 1e-3
    heritage: bool = True
    diversity: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.weight < math.inf, self, "weight", "at least 0 and finite")
        require(0 <= self.tau < math.inf, self, "tau", "at least 0 and finite")
        if not (self.heritage or self.diversity):
            raise ConfigError("A coupling needs heritage or diversity; use Parallel to go without both.")

    @property
    def hard(self) -> bool:
        """Whether the sign of the paper is in force, which leaves the map without a fixed point."""
        return self.diversity and self.weight > 0 and self.tau == 0

    def gain(self, channels: int) -> float:
        """Bound `g` on the eigenvalues of `∂h` from above: `1 + λ(C-1)` with heritage and diversity."""
        return float(self.heritage) + self.weight * (channels - 1) * self.diversity

    def at(self, state: State, error: float = 0.0) -> Coupling:
        """The coupling of branches shaped like `state`, with the width `t` measured on it.

        Args:
            state: one tensor for each branch.
            error: the relative rounding error that is allowed to products.

        Raises:
            ConfigError: for fewer than two branches, or branches with different channels.
            ShapeError: for sizes that do not divide.
        """
        z = tensors_of(state)
        check_channels([int(branch.shape[1]) for branch in z])  # tensors, for a tracer
        width = None
        if self.diversity and self.weight > 0 and self.tau > 0:
            squares = torch.stack([sample_sums(branch.square()) for branch in z])
            width = (self.tau * squares.mean(0)).clamp(min=torch.finfo(squares.dtype).eps)
        channels = int(z[0].shape[1])
        ring = Ring.of([tuple(map(int, b.shape[2:])) for b in z], channels)
        return Coupling(self, channels, ring, width, error)


def _with_diagonal(matrices: Tensor, value: float) -> Tensor:
    """The matrices `(batch, C, C)` with a constant on their diagonals, in place where nothing records it."""
    if tracing():
        places = torch.eye(matrices.shape[1], dtype=torch.bool, device=matrices.device)
        return matrices.masked_fill(places, value)
    matrices.diagonal(dim1=1, dim2=2).fill_(value)
    return matrices


def check_channels(channels: Sequence[int]) -> None:
    """Raise a `ConfigError` unless branches with these channels can be coupled."""
    if len(channels) < 2:
        raise ConfigError(
            "Heritage and diversity couple neighbouring branches, of which there is one;"
            " add a branch, or use Parallel for a single one."
        )
    if len(set(channels)) > 1:
        raise ConfigError(f"Expected coupled branches to have equal channels, got {list(channels)}.")


@dataclass(frozen=True, eq=False)
class Coupling(HoldsTensors):
    """`λD_τ - H` and its derivatives for one batch. Immutable.

    `h = -½∇(λD_τ - H)` is what the branches receive from their neighbours. Its Jacobian is symmetric and,
    with `g = 1 + λ(C-1)`, obeys `-(g + κ)I ⪯ ∂h ⪯ gI`: the terms of `∇²D_τ` with the slopes of Huber's
    function are at most `C - 1` in norm, and those with its curvature, the `κ ≥ 0`, are convex.

    Attributes:
        options: the objective.
        channels: `C`.
        ring: the pairs of neighbours.
        width: `(batch,)` `t`, the width of the quadratic part of `D_τ`; None without one.
        error: the relative rounding error that is allowed to products.
    """

    options: HeritageDiversity
    channels: int
    ring: Ring
    width: Tensor | None
    error: float = 0.0

    def correlations(self, state: State) -> tuple[Tensor, ...]:
        """`N` of each pair, `(batch, C, C)`; `H` is its trace, `D` the sum of its other entries' sizes."""
        pairs = self.ring.read(tensors_of(state), self.ring.junctions)
        return tuple(_product(a.mT, b, self.error) for a, b in pairs)

    def value(self, state: State) -> Tensor:
        """`(batch,)` `Σ_i λD_τ(z_i, z_{i+1}) - H(z_i, z_{i+1})`."""
        return torch.stack([self._objective(n) for n in self.correlations(state)]).sum(0)

    def gradient(self, state: State) -> tuple[Tensor, ...]:
        """`h`, one tensor per branch."""
        return _received(self.ring, self._meetings(state, self.ring.junctions))

    def gradient_of(self, branch: int, state: State) -> Tensor:
        """`h_i` of one branch, which depends on its two neighbours alone."""
        mine = [junction for junction in self.ring.junctions if branch in junction.branches]
        meetings = self._meetings(state, mine)
        return self.ring.write(m.message(m.junction.branches.index(branch)) for m in meetings)[branch]

    def linearize(self, state: State) -> CouplingLinearization:
        """`h` and its Jacobian at `state`."""
        return CouplingLinearization(self, self._meetings(state, self.ring.junctions))

    def expect_smooth(self) -> None:
        """Raise a `ConfigError` for the hard sign of the paper, with which `h` jumps."""
        if self.options.hard:
            raise ConfigError(
                "With tau=0 the map jumps: no Lipschitz bound holds, and in general there is no fixed point;"
                " give the coupling a `tau`."
            )

    @property
    def gain(self) -> float:
        """`g`, never below the largest eigenvalue of `∂h`."""
        return self.options.gain(self.channels)

    def jacobian_bound(self, state: State | None = None) -> Tensor:
        """A number that is never below `‖∂h‖₂`: for all states, or `(batch,)` at a state.

        It is `g` without `D_τ`. With it it is `g + κ` at a state, where `κ` grows with the square of the
        state, so that there is none for all of them. Nor is there with the hard sign, which jumps.
        """
        if state is None:
            return torch.tensor(math.inf if self.width is not None or self.options.hard else self.gain)
        meetings = self._meetings(state, self.ring.junctions)
        spread = torch.stack([_spread(m, self.curvature(m.n)) for m in meetings])
        # A branch takes part in its own junction and in that of the branch before.
        return self.gain + (spread + spread.roll(1, 0)).amax(0)

    def slope(self, n: Tensor) -> Tensor:
        """`K = -½ ∂(λD_τ - H)/∂N`."""
        if self.options.diversity:
            # In place: a fresh tensor costs as much as the arithmetic.
            clipped = n.sign() if self.width is None else (n / self.width[:, None, None]).clamp_(-1, 1)
            k = clipped.mul_(-0.5 * self.options.weight)
        else:
            k = torch.zeros_like(n)
        return _with_diagonal(k, 0.5 * self.options.heritage)

    def curvature(self, n: Tensor) -> Tensor | None:
        """`-∂K/∂N`, entry by entry; None where it vanishes altogether."""
        if self.width is None:
            return None
        t = self.width[:, None, None]
        return _with_diagonal(torch.where(n.abs() < t, 0.5 * self.options.weight / t, 0.0), 0.0)

    def _meetings(self, state: State, junctions: Sequence[Junction]) -> list[_Meeting]:
        meetings = []
        for junction, (a, b) in zip(junctions, self.ring.read(tensors_of(state), junctions), strict=True):
            n = _product(a.mT, b, self.error)
            meetings.append(_Meeting(junction, a, b, n, self.slope(n), self.error))
        return meetings

    def _objective(self, n: Tensor) -> Tensor:
        trace = n.diagonal(dim1=1, dim2=2).sum(1)
        total = -trace if self.options.heritage else torch.zeros_like(trace)
        if not self.options.diversity:
            return total
        size = n.abs()
        if self.width is not None:
            t = self.width[:, None, None]
            size = torch.where(size <= t, 0.5 * n.square() / t, size - 0.5 * t)
        return total + self.options.weight * (size.sum((1, 2)) - size.diagonal(dim1=1, dim2=2).sum(1))


class CouplingLinearization:
    """`h` and `∂h` at one state."""

    def __init__(self, coupling: Coupling, meetings: Sequence[_Meeting]) -> None:
        self._ring, self._width, self._meetings = coupling.ring, coupling.width, meetings
        self._curvatures = [coupling.curvature(m.n) for m in meetings]

    def gradient(self) -> tuple[Tensor, ...]:
        """`h`."""
        return _received(self._ring, self._meetings)

    def product(self, v: State) -> tuple[Tensor, ...]:
        """`∂h v`, symmetric."""
        return self.product_and_pullback(v)[0]

    def pullback(self, u: State) -> Gradients:
        """Gradients of `⟨u, h⟩` with respect to the coupling's `tensors`."""
        return self._pullback([_of_width(m, fall) for m, fall, _, _ in self._moves(u)])

    def product_and_pullback(self, v: State) -> tuple[tuple[Tensor, ...], Gradients]:
        """`product` and `pullback` of one state, which share their work."""
        parts = []

        def messages() -> Iterator[tuple[End, Tensor]]:
            for m, fall, da, db in self._moves(v):
                parts.append(_of_width(m, fall))
                yield from _moved(m, fall, da, db)

        return _gathered(self._ring, messages()), self._pullback(parts)

    def _pullback(self, parts: Sequence[Tensor | None]) -> Gradients:
        if self._width is None:
            return ()
        return (torch.stack([part for part in parts if part is not None]).sum(0) / self._width,)

    def _moves(self, v: State) -> Iterator[tuple[_Meeting, Tensor | None, Tensor, Tensor]]:
        """Every meeting with the moves of `-K`, `A` and `B` that `v` makes; None where `K` stays."""
        read = self._ring.read(tensors_of(v), self._ring.junctions)
        for m, q, (da, db) in zip(self._meetings, self._curvatures, read, strict=True):
            yield m, None if q is None else m.turn(da, db).mul_(q), da, db


@dataclass(frozen=True, eq=False, slots=True)
class _Meeting:
    """Two neighbours at a state: `A = z_i` and `B = P z_j` as matrices, `N = AᵀB`, and `K` of `slope`."""

    junction: Junction
    a: Tensor
    b: Tensor
    n: Tensor
    k: Tensor
    error: float

    def message(self, side: int) -> tuple[End, Tensor]:
        """The part of `h` that the first (0) or the second (1) of the two receives."""
        pair = (self.a, self.k) if side else (self.b, self.k.mT)
        return self.junction.ends[side], _product(*pair, self.error)

    def turn(self, da: Tensor, db: Tensor) -> Tensor:
        """`dN` for moves of `A` and `B`."""
        return _add_product(_product(da.mT, self.b, self.error), self.a.mT, db, self.error)


def _of_width(m: _Meeting, fall: Tensor | None) -> Tensor | None:
    """`(batch,)` `t` times the part of a pullback to the width `t` that comes from one meeting."""
    # ⟨u, h⟩ = ⟨K, dN⟩ for the move u of the state, and K depends on t as -q·N does on N.
    return None if fall is None else (fall * m.n).sum((1, 2))


def _moved(m: _Meeting, fall: Tensor | None, da: Tensor, db: Tensor) -> Iterator[tuple[End, Tensor]]:
    """What the two receive more when `A`, `B` and `-K` move."""
    first, second = _product(db, m.k.mT, m.error), _product(da, m.k, m.error)
    if fall is not None:
        _add_product(first, m.b, fall.mT, m.error, -1)
        _add_product(second, m.a, fall, m.error, -1)
    return zip(m.junction.ends, (first, second), strict=True)


def _received(ring: Ring, meetings: Sequence[_Meeting]) -> tuple[Tensor, ...]:
    return _gathered(ring, (m.message(side) for m in meetings for side in (0, 1)))


def _gathered(ring: Ring, messages: Iterable[tuple[End, Tensor]]) -> tuple[Tensor, ...]:
    """What every branch receives at its two junctions."""
    received = ring.write(messages)
    return tuple(received[branch] for branch in range(len(received)))


def _spread(meeting: _Meeting, curvature: Tensor | None) -> Tensor:
    """`(batch,)` bound on `‖dN‖²` times the largest curvature, for moves of unit length."""
    shares = meeting.junction.shares
    a, b = (torch.linalg.matrix_norm(m, 2) for m in (meeting.a, meeting.b))
    steepest = torch.zeros_like(a) if curvature is None else curvature.amax((1, 2))
    return steepest * (shares[0] * b.square() + shares[1] * a.square())


def _product(left: Tensor, right: Tensor, error: float) -> Tensor:
    # In full precision: N is compared with a width far below its size.
    with full_precision(left.device):
        return multiply_each(left, right, error=error)


def _add_product(total: Tensor, left: Tensor, right: Tensor, error: float, factor: float = 1) -> Tensor:
    """`total + factor · left @ right`, in place."""
    with full_precision(left.device):
        return multiply_each(left, right, total, factor, error=error)
