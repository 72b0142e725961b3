"""The steps of Anderson's method: in C where they can be, else with PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.serving import takes

# A residual this many times the best one seen sends a sample back to the best iterate.
_GROWTH = 3.0


@dataclass(frozen=True)
class History:
    """What Anderson's method keeps of each row.

    Attributes:
        changes: `(batch, memory, n)` `g_i`.
        candidates: `(batch, memory, n)` `z_i + β g_i`.
        gram: `(batch, memory, memory)` `⟨g_i, g_j⟩` in float64.
        best: `(batch,)` the smallest `‖g_i‖` since the last restart, in float64.
        before: `(batch,)` the same at the last look for stagnation.
        born: `(batch,)` the number of the first iterate that may be used.
        ridge: the regularisation, relative to the diagonal of `gram`.
        in_c: whether compiled code takes them, asked once for a solve.
    """

    changes: Tensor
    candidates: Tensor
    gram: Tensor
    best: Tensor
    before: Tensor
    born: Tensor
    ridge: float
    in_c: bool

    @staticmethod
    def like(x: Tensor, memory: int) -> History:
        """An empty one for `(batch, n)` iterates like `x`."""
        batch, n = x.shape
        wide = {"dtype": torch.float64, "device": x.device}
        infinite = torch.full((batch,), torch.inf, **wide)
        changes = x.new_empty(batch, memory, n)
        return History(
            changes,
            torch.empty_like(changes),
            torch.zeros(batch, memory, memory, **wide),
            infinite,
            infinite.clone(),
            torch.zeros(batch, dtype=torch.long, device=x.device),
            # Proportional to each change; a tiny number serves exact zeros. What falling residuals do to the
            # scales of the system, elimination in float64 does not mind.
            10 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps,
            takes(changes),
        )


def mix(history: History, norms: Tensor, count: int, look: bool) -> Tensor:
    """Anderson's next iterate `Σ α_i (z_i + β g_i)`, `(batch, n)`.

    The weights `α` with sum 1 make `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` smallest; a row that restarts takes the
    candidate of its smallest change, and forgets all.

    Args:
        history: with the newest change and candidate at `count` modulo its memory.
        norms: `(batch, 2)`, of the newest change first.
        count: how many iterates came before.
        look: whether to look for stagnation.
    """
    h = history
    memory = h.changes.shape[1]
    if h.in_c:
        kept = (h.changes, h.candidates, h.gram, h.best, h.before, h.born)
        return _mix(*kept, norms, count, look, h.ridge)
    slot, used = count % memory, min(count + 1, memory)
    # As a product of a row with a matrix this runs many times faster than matrix times column.
    products = torch.bmm(h.changes[:, slot, None], h.changes[:, :used].mT)[:, 0]
    h.gram[:, slot, :used] = products
    h.gram[:, :used, slot] = products
    gram = h.gram[:, :used, :used]
    steps_back = (slot - torch.arange(used, device=gram.device)) % memory
    usable = count - steps_back >= h.born[:, None]
    restart = _restarts(h, norms[:, 0], count, look)[:, None]
    measured = gram.diagonal(dim1=1, dim2=2).masked_fill(~usable, torch.inf)
    best = F.one_hot(measured.argmin(1), used).to(gram.dtype)
    weights = torch.where(restart, best, _weights(gram, usable, slot, h.ridge)).to(h.candidates.dtype)
    return torch.bmm(weights[:, None], h.candidates[:, :used])[:, 0]


def _restarts(h: History, sizes: Tensor, count: int, look: bool) -> Tensor:
    """`(batch,)` whose residual grows, or, at a look, has not improved since the last one."""
    restart = sizes > _GROWTH * h.best
    h.best.copy_(torch.where(sizes < h.best, sizes, h.best))
    if look:
        restart |= h.best >= h.before
        h.before.copy_(h.best)
    h.best.masked_fill_(restart, torch.inf)
    h.before.masked_fill_(restart, torch.inf)
    h.born.masked_fill_(restart, count + 1)
    return restart


def _weights(gram: Tensor, usable: Tensor, newest: int, ridge: float) -> Tensor:
    """`(batch, used)` mixing weights `α`, zero for iterates that a sample may not use."""
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    regular = torch.addcmul(torch.finfo(gram.dtype).tiny * identity, gram, 1 + ridge * identity)
    both = usable[:, :, None] & usable[:, None, :]
    system = torch.where(both, regular, identity)
    solution, info = torch.linalg.solve_ex(system, usable.to(gram.dtype))
    weights = solution / solution.sum(1, keepdim=True)
    # Where the history has an exact dependence, a Picard step needs none of it.
    return torch.where((info > 0)[:, None], identity[newest], weights)


def _next_like(changes: Tensor, *_: object) -> Tensor:
    return changes.new_empty(changes.shape[0], changes.shape[2])


@operator(
    "rows_mix(Tensor changes, Tensor candidates, Tensor(a!) gram, Tensor(b!) best, Tensor(c!) before,"
    " Tensor(d!) born, Tensor norms, int count, bool look, float ridge) -> Tensor",
    _next_like,
)
def _mix(changes: Tensor, *others: Tensor | float) -> Tensor:
    following = _next_like(changes)
    *kept, count, look, ridge = others
    sizes = (*changes.shape, count, look, ridge, _GROWTH)
    call("rows_mix", "8P4Ni2di", changes, *kept, following, *sizes)
    return following
