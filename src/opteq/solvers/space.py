"""States seen as one matrix with a row per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.rows import row_norms
from opteq.results import State, like, map_state, tensors_of
from opteq.tensors.layouts import has_channels_last


class Space:
    """The shapes and memory layout of a state, and its flat form `(batch, n)`.

    A state of one tensor, contiguous or channels-last, is flattened and restored without a copy.
    The branches of a state of several tensors are laid side by side.

    Args:
        example: a state.
        joint: flatten the whole batch into one row, for samples that enter each other's equation.
    """

    def __init__(self, example: State, joint: bool = False) -> None:
        self._single, self._joint = isinstance(example, Tensor), joint
        self._batch = tensors_of(example)[0].shape[0]
        self._layouts = [_Layout(t) for t in tensors_of(example)]

    def flatten(self, state: State) -> Tensor:
        """`(batch, n)` matrix of `state`, a view where the layout allows it."""
        parts = self.parts(state)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def parts(self, state: State) -> list[Tensor]:
        """Matrices that make up `flatten(state)` side by side, views where the layout allows it."""
        parts = [layout.flatten(t) for layout, t in zip(self._layouts, tensors_of(state), strict=True)]
        return [torch.cat(parts, dim=1).reshape(1, -1)] if self._joint else parts

    def arranged(self, state: State) -> State:
        """`state` in the memory layout of the example, without a copy where it has it."""
        pairs = zip(self._layouts, tensors_of(state), strict=True)
        return like(state, tuple(layout.restore(layout.flatten(t)) for layout, t in pairs))

    def subtract(self, flat: Tensor, state: State, overwrite: bool) -> Tensor:
        """`flat - flatten(state)`, in the memory of `state` if that may be overwritten."""
        parts = self.parts(state)
        if overwrite and len(parts) == 1:
            return torch.sub(flat, parts[0], out=parts[0])
        difference = torch.empty_like(flat)
        for place, row, part in zip(*map(self._split, (difference, flat)), parts, strict=True):
            torch.sub(row, part, out=place)
        return difference

    def restore(self, flat: Tensor) -> State:
        """The state of a `(batch, n)` matrix; the inverse of `flatten`."""
        if self._joint:
            flat = flat.reshape(self._batch, -1)
        if self._single:
            return self._layouts[0].restore(flat)
        parts = zip(self._layouts, self._split(flat), strict=True)
        return tuple(layout.restore(part) for layout, part in parts)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([layout.size for layout in self._layouts], dim=1)


def relative_change(old: State, new: State) -> Tensor:
    """`(batch,)` `‖new - old‖ / ‖new‖`, constant to autograd."""
    with torch.no_grad():
        space = Space(new)
        size = row_norms(space.flatten(new))
        change = row_norms(space.flatten(map_state(torch.sub, new, old)))
        return change / size.clamp(min=torch.finfo(size.dtype).tiny)


class _Layout:
    def __init__(self, example: Tensor) -> None:
        self.shape = example.shape[1:]
        self.size = self.shape.numel()
        self.channels_last = has_channels_last(example)

    def flatten(self, tensor: Tensor) -> Tensor:
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.reshape(tensor.shape[0], self.size)

    def restore(self, rows: Tensor) -> Tensor:
        if self.channels_last:
            channels, height, width = self.shape
            return rows.reshape(rows.shape[0], height, width, channels).permute(0, 3, 1, 2)
        return rows.reshape(rows.shape[0], *self.shape)
