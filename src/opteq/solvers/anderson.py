"""Anderson acceleration."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.native import readable
from opteq.options import require, require_bounded_solve, strict_options
from opteq.solvers.base import Solver, Stepper
from opteq.solvers.rows import History, compiled

# A residual this many times the best one seen sends a sample back to the best iterate.
_GROWTH = 3.0


@strict_options
@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration (type II), also known as Anderson mixing, Pulay mixing or DIIS.

    With `g_i = T(z_i) - z_i` over the last `memory` iterates, the next iterate is
    `Σ α_i (z_i + β g_i)`, where `α` minimises `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` under `Σ α_i = 1`.
    Weighing the regularisation by `‖g_i‖` makes the method independent of the scale of `z`. Inner
    products are computed once per pair, and the small systems are solved in float64.

    Safeguard, per sample: when the residual grows threefold, or does not improve for `memory + 2`
    steps, a Picard step is taken from the best iterate in the history, and the history is dropped. So
    where `T` contracts, every start afresh is closer to the fixed point than the one before.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        memory: number of iterates combined, at least 1 (1 is Picard iteration).
        damping: `β`, in (0, 1].
    """

    tol: float = 1e-4
    max_steps: int = 50
    memory: int = 4
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_bounded_solve(self)
        require(self.memory >= 1, self, "memory", "at least 1")
        require(0 < self.damping <= 1, self, "damping", "in (0, 1]")

    def start(self, x: Tensor) -> Stepper:
        return _AndersonStepper(x, self.memory, self.damping)


class _AndersonStepper:
    def __init__(self, x: Tensor, memory: int, damping: float) -> None:
        batch, n = x.shape
        self.memory, self.damping = memory, damping
        self.count = 0  # iterates seen
        self.changes = x.new_empty(batch, memory, n)  # g_i
        self.candidates = x.new_empty(batch, memory, n)  # z_i + β g_i
        self.slots = list(zip(self.candidates.unbind(1), self.changes.unbind(1), strict=True))
        wide = {"dtype": torch.float64, "device": x.device}
        self.gram = torch.zeros(batch, memory, memory, **wide)  # ⟨g_i, g_j⟩
        # The smallest change since a sample's last restart.
        self.best = torch.full((batch,), math.inf, **wide)
        self.before = self.best.clone()  # that at the last look for stagnation
        self.born = torch.zeros(batch, dtype=torch.long, device=x.device)  # the first iterate it may use
        # The regularisation is proportional to each change; a tiny number serves exact zeros.
        # What falling residuals do to the scales of the system, elimination in float64 does not mind.
        self.ridge = 10 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        self.library = compiled() if readable(self.changes[:, 0]) else None
        kept = (self.changes, self.candidates, self.gram, self.best, self.before, self.born)
        options = (self.ridge, _GROWTH, batch, memory, n)
        # Where C finds it; `_mixed` moves none of it.
        self.history = History(*(t.data_ptr() for t in kept), *options)

    @property
    def rooms(self) -> tuple[Tensor, Tensor]:
        return self.slots[self.count % self.memory]

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, norms: Tensor) -> Tensor:
        if self.damping != 1:
            torch.add(x, g, alpha=self.damping, out=f)
        look = self.count % (self.memory + 2) == self.memory + 1
        mixed = None if self.library is None else self._mixed_in_c(self.library, norms, look)
        if mixed is None:
            mixed = self._mixed(norms[:, 0], look)
        self.count += 1
        return mixed

    def _mixed_in_c(self, library: ctypes.CDLL, norms: Tensor, look: bool) -> Tensor | None:
        """`_mixed` in one pass; None if there was no memory."""
        following = self.changes.new_empty(self.history.rows, self.history.n)
        options = (self.count, look, following.data_ptr(), torch.get_num_threads())
        failed = library.opteq_rows_mix(self.history, norms.data_ptr(), *options)
        return None if failed else following

    def _mixed(self, sizes: Tensor, look: bool) -> Tensor:
        """The next iterate, when the newest `g` has been written, from the norms of it."""
        slot, used = self.count % self.memory, min(self.count + 1, self.memory)
        # As a product of a row with a matrix this runs many times faster than matrix times column.
        products = torch.bmm(self.changes[:, slot, None], self.changes[:, :used].mT)[:, 0]
        self.gram[:, slot, :used] = products
        self.gram[:, :used, slot] = products
        gram = self.gram[:, :used, :used]
        steps_back = (slot - torch.arange(used, device=gram.device)) % self.memory
        usable = self.count - steps_back >= self.born[:, None]
        restart = self._restarts(sizes, look)[:, None]
        measured = gram.diagonal(dim1=1, dim2=2).masked_fill(~usable, math.inf)
        best = F.one_hot(measured.argmin(1), used).to(gram.dtype)
        weights = torch.where(restart, best, self._weights(gram, usable, slot)).to(self.candidates.dtype)
        return torch.bmm(weights[:, None], self.candidates[:, :used])[:, 0]

    def _restarts(self, sizes: Tensor, look: bool) -> Tensor:
        """`(batch,)` whose residual grows, or, at a look, has not improved since the last one."""
        restart = sizes > _GROWTH * self.best
        self.best.copy_(torch.where(sizes < self.best, sizes, self.best))
        if look:
            restart |= self.best >= self.before
            self.before.copy_(self.best)
        self.best.masked_fill_(restart, math.inf)
        self.before.masked_fill_(restart, math.inf)
        self.born.masked_fill_(restart, self.count + 1)
        return restart

    def _weights(self, gram: Tensor, usable: Tensor, newest: int) -> Tensor:
        """`(batch, used)` mixing weights `α`, zero for iterates that a sample may not use."""
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        regular = torch.addcmul(torch.finfo(gram.dtype).tiny * identity, gram, 1 + self.ridge * identity)
        both = usable[:, :, None] & usable[:, None, :]
        system = torch.where(both, regular, identity)
        solution, info = torch.linalg.solve_ex(system, usable.to(gram.dtype))
        weights = solution / solution.sum(1, keepdim=True)
        # Where the history has an exact dependence, a Picard step needs none of it.
        return torch.where((info > 0)[:, None], identity[newest], weights)
