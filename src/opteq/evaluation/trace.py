"""How an equilibrium layer reaches its equilibrium, image by image."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.evaluation.attention import patch_attention
from opteq.evaluation.display import Normalization, displayable
from opteq.layer import EquilibriumLayer
from opteq.maps.hidden import HiddenReadout
from opteq.results import State, map_state, tensors_of
from opteq.theory.claims import DISTANCE, expect_own_claims
from opteq.theory.minimisers import certified_convex, kind_at

Kind = TypeVar("Kind", bound=nn.Module)

SHOWN_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Traces:
    """Iterations and equilibria of the first equilibrium layer, for a few images.

    A network without such a layer has the traces of zero images (`n = 0`).

    Attributes:
        images: `(n, height, width, 1 or 3)` in [0, 1].
        symbol: `()` what is read out of the state, `z`, the state itself, or `y`, its hidden variable.
        residual: `(n, steps + 1)` relative residual along a plain iteration.
        tolerance: `()` relative residual at which a solve ends; NaN for a layer without one.
        energy: `(n, steps + 1)` hidden objective along it, `(n, 0)` for maps that have none.
        distance: `(n,)` bound on the distance of the computed equilibrium from the true one; NaN where none
            is certified.
        rms: `(n, h, w)` root mean square over the channels of what is read out of the equilibrium.
        channels: `(n, k, h, w)` the `k` channels that vary most, the same ones for every image.
        channel_indices: `(k,)` which channels these are.
        attention: `(n, branches, h, w)` weights of the patches at the equilibrium; `(n, 0, 1, 1)` for
            maps other than Gaussian ones with patches.
        minimiser: `(n,)` whether the equilibrium is certified to minimise the hidden objective; `(0,)` where
            nothing is known of it but that it is a fixed point.
        local_minimiser: likewise, whether it appears to minimise it among the states nearby.
    """

    images: NDArray[np.float32]
    symbol: NDArray[np.str_]
    residual: NDArray[np.float64]
    tolerance: NDArray[np.float64]
    energy: NDArray[np.float64]
    distance: NDArray[np.float64]
    rms: NDArray[np.float32]
    channels: NDArray[np.float32]
    channel_indices: NDArray[np.int64]
    attention: NDArray[np.float32]
    minimiser: NDArray[np.bool_]
    local_minimiser: NDArray[np.bool_]


def trace(network: nn.Module, images: Tensor, normalization: Normalization) -> Traces:
    """Follow the equilibrium layer that `network` calls first, on its way to its equilibria.

    Of an equilibrium of several branches the first one is kept.

    Args:
        network: maps `images` to anything.
        images: `(n, channels, height, width)`, normalised.
        normalization: the mean and standard deviation that were applied to `images`.
    """
    call = first_call(network, images)
    if call is None:
        return _no_traces()
    layer, x = call
    # In float64 on the CPU: near the equilibrium the objective changes by less than float32 resolves.
    layer = copy.deepcopy(layer).cpu().double()
    layer.on_unconverged = "count"  # The network's own pass has said it already.
    x = map_state(lambda t: t.cpu().double(), x)
    solution = layer.solve(x, trace=True)
    assert solution.trace is not None
    state = tensors_of(solution.value)[0]
    # A dense state has no height and width: it is shown as a strip, one pixel per unit.
    maps = state if state.ndim == 4 else state.flatten(1)[:, None, None, :]
    spread = maps.var(dim=(0, 2, 3), correction=0)
    shown = spread.argsort(descending=True, stable=True)[:SHOWN_CHANNELS]
    energy = solution.trace.energy
    with torch.no_grad():
        equation = layer.bind(x)
        attention = patch_attention(equation, solution.value)
    minimiser, local_minimiser = _kinds(layer, x, solution.state)
    return Traces(
        images=displayable(images, normalization),
        symbol=np.array(read_as(layer)),
        residual=solution.trace.residual.numpy(),
        tolerance=np.array(layer.solver.tol if layer.solver else np.nan),
        energy=np.zeros((len(images), 0)) if energy is None else energy.numpy(),
        distance=_distances(layer, x, solution.state),
        rms=maps.square().mean(1).sqrt().float().numpy(),
        channels=maps[:, shown].float().numpy(),
        channel_indices=shown.numpy(),
        attention=np.zeros((len(images), 0, 1, 1), np.float32)
        if attention is None
        else attention.float().numpy(),
        minimiser=minimiser,
        local_minimiser=local_minimiser,
    )


@torch.no_grad()
def _kinds(layer: EquilibriumLayer, x: State, states: State) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which equilibria are certified to be minimisers, and which appear to be local ones."""
    try:
        certified = certified_convex(layer.bind(x).curvature())
    except ConfigError:
        return np.zeros(0, np.bool_), np.zeros(0, np.bool_)
    local = certified
    if not certified.all():
        # One by one: the estimate keeps many tensors like the state.
        rows = [slice(i, i + 1) for i in range(len(certified))]
        kinds = [kind_at(layer.bind(_part(x, row)), _part(states, row)) for row in rows]
        local = torch.cat([kind.local_minimiser for kind in kinds])
    return certified.numpy(), local.numpy()


@torch.no_grad()
def _distances(layer: EquilibriumLayer, x: State, states: State) -> NDArray[np.float64]:
    """Certified bounds on how far each state is from the equilibrium, NaN where there are none."""
    try:
        equation = layer.bind(x)
        expect_own_claims(equation, DISTANCE)
        bound = equation.distance_bound(states)
    except ConfigError:
        return np.full(len(tensors_of(states)[0]), np.nan)
    known = bound.value.isfinite() & (bound.kind != "estimate")
    return bound.value.where(known, torch.nan).numpy()


def _part(state: State, row: slice) -> State:
    return map_state(lambda t: t[row], state)


def read_as(layer: EquilibriumLayer) -> str:
    """The symbol of what is read out of a state: `z`, the state itself, or `y`, its hidden variable."""
    return "y" if isinstance(layer.map, HiddenReadout) else "z"


def first_call(network: nn.Module, images: Tensor) -> tuple[EquilibriumLayer, State] | None:
    """The first equilibrium layer that `network(images)` calls and its input, if it calls one."""
    with noting(m for m in network.modules() if isinstance(m, EquilibriumLayer)) as calls:
        network(images)
    return calls[0] if calls else None


@contextmanager
def noting(modules: Iterable[Kind]) -> Iterator[list[tuple[Kind, Any]]]:
    """Note which of the modules are called meanwhile, in that order, and their first inputs."""
    calls: list[tuple[Kind, Any]] = []

    def note(module: Kind, inputs: tuple[Any, ...]) -> None:
        calls.append((module, inputs[0]))

    hooks = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _no_traces() -> Traces:
    nothing = np.zeros((0, 0))
    picture = np.zeros((0, 1, 1), np.float32)
    return Traces(
        images=picture[..., None],
        symbol=np.array("z"),
        residual=nothing,
        tolerance=np.array(np.nan),
        energy=nothing,
        distance=np.zeros(0),
        rms=picture,
        channels=picture[:, None],
        channel_indices=np.zeros(0, np.int64),
        attention=picture[:, None],
        minimiser=np.zeros(0, np.bool_),
        local_minimiser=np.zeros(0, np.bool_),
    )
