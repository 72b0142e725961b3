"""Where the branches of a multi-branch model meet: neighbours on a ring, at the smaller of their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from opteq.errors import ShapeError
from opteq.operators.resample import AveragePool, BoundPool

Size = tuple[int, ...]


class End(NamedTuple):
    """A branch at one of the sizes of its pyramid."""

    branch: int
    level: int


@dataclass(frozen=True, slots=True)
class Junction:
    """Where two neighbours meet: at the smaller of their sizes, to which the larger is averaged.

    `z_iᵀ P z_j` with an up-sampling `P = Aᵀ` is `(A z_i)ᵀ z_j` with the averaging `A`.

    Attributes:
        ends: the two.
        shares: `‖A‖²` for each, the pixels of its smaller image over those of its larger one.
    """

    ends: tuple[End, End]
    shares: tuple[float, float]

    @property
    def branches(self) -> tuple[int, int]:
        """The numbers of the two."""
        return self.ends[0].branch, self.ends[1].branch


class Averaging(NamedTuple):
    """How a level of a pyramid is made: from which one, and by what."""

    source: int
    pool: BoundPool


@dataclass(frozen=True, slots=True)
class Pyramid:
    """The sizes at which a branch meets its neighbours, each averaged from the smallest that it divides.

    Attributes:
        sizes: height and width, empty for vectors; the branch's own first, then downwards.
        steps: how every size but the first is made.
    """

    sizes: tuple[Size, ...]
    steps: tuple[Averaging, ...]

    def expand(self, images: list[Tensor | None]) -> Tensor:
        """The adjoint of the averaging, summed over the levels; overwrites `images`.

        A level's image goes up by way of those that it was made from, so that what arrives at a size is
        added up there, before the next and dearer up-sampling.
        """
        for level in range(len(self.steps), 0, -1):
            image, (source, pool) = images[level], self.steps[level - 1]
            if image is not None:
                images[source] = pool.add_adjoint(images[source], image)
        assert images[0] is not None
        return images[0]


@dataclass(frozen=True, slots=True)
class Ring:
    """The pairs of neighbours: the first branch with the second, …, the last with the first.

    Attributes:
        junctions: the pairs.
        pyramids: the sizes of every branch.
    """

    junctions: tuple[Junction, ...]
    pyramids: tuple[Pyramid, ...]

    @classmethod
    def of(cls, sizes: Sequence[Size], channels: int) -> Ring:
        """The ring of branches of these heights and widths.

        Raises:
            ShapeError: for neighbours whose sizes do not divide.
        """
        pairs = [(i, (i + 1) % len(sizes)) for i in range(len(sizes))]
        met = [_meeting_size(sizes, *pair) for pair in pairs]
        pyramids = []
        for branch, size in enumerate(sizes):
            smaller = {m for pair, m in zip(pairs, met, strict=True) if branch in pair} - {size}
            pyramids.append(_pyramid((size, *sorted(smaller, key=math.prod, reverse=True)), channels))
        junctions = []
        for pair, size in zip(pairs, met, strict=True):
            first, second = (End(branch, pyramids[branch].sizes.index(size)) for branch in pair)
            shares = [math.prod(size) / math.prod(sizes[branch]) for branch in pair]
            junctions.append(Junction((first, second), (shares[0], shares[1])))
        return cls(tuple(junctions), tuple(pyramids))

    def read(self, state: tuple[Tensor, ...], junctions: Iterable[Junction]) -> list[tuple[Tensor, Tensor]]:
        """Both neighbours of these junctions as matrices `(batch, pixels, C)`."""
        images: dict[End, Tensor] = {}
        pairs = [tuple(self._image(end, state, images) for end in junction.ends) for junction in junctions]
        return [(_matrix(first), _matrix(second)) for first, second in pairs]

    def _image(self, end: End, state: tuple[Tensor, ...], images: dict[End, Tensor]) -> Tensor:
        """The branch at this size; `images` has those that were made before."""
        # Not a function inside `read`: one that calls itself keeps the images until Python looks for cycles.
        if end not in images:
            if end.level == 0:
                images[end] = state[end.branch]
            else:
                source, pool = self.pyramids[end.branch].steps[end.level - 1]
                images[end] = pool(self._image(End(end.branch, source), state, images))
        return images[end]

    def write(self, messages: Iterable[tuple[End, Tensor]]) -> dict[int, Tensor]:
        """The adjoint of `read`: the sum of what each branch receives; may overwrite the messages."""
        received: dict[int, list[Tensor | None]] = {}
        for (branch, level), matrix in messages:
            sizes = self.pyramids[branch].sizes
            images = received.setdefault(branch, [None] * len(sizes))
            image = matrix.mT.reshape(matrix.shape[0], matrix.shape[2], *sizes[level])
            images[level] = _added(images[level], image)
        return {branch: self.pyramids[branch].expand(images) for branch, images in received.items()}


def _pyramid(sizes: tuple[Size, ...], channels: int) -> Pyramid:
    steps = []
    for level, size in enumerate(sizes[1:], start=1):
        factors = [_factor(larger, size) for larger in sizes[:level]]
        source, factor = [(i, f) for i, f in enumerate(factors) if f is not None][-1]
        pool = AveragePool(channels, factor).act((), (channels, *sizes[source]), error=0.0)
        steps.append(Averaging(source, pool))
    return Pyramid(sizes, tuple(steps))


def _meeting_size(sizes: Sequence[Size], i: int, j: int) -> Size:
    """The smaller of two sizes, which has to divide the other."""
    small, large = sorted((sizes[i], sizes[j]), key=math.prod)
    if _factor(large, small) is None:
        raise ShapeError(
            "Expected neighbouring branches whose height and width divide by one factor,"
            f" got {sizes[i]} for branch {i + 1} and {sizes[j]} for branch {j + 1}."
        )
    return small


def _factor(large: Size, small: Size) -> int | None:
    """`f` with `large = f · small`; None where there is none."""
    if large == small:
        return 1
    factors = {n // m for n, m in zip(large, small, strict=False)}
    f = min(factors, default=0)
    return f if tuple(f * m for m in small) == large else None


def _matrix(image: Tensor) -> Tensor:
    # Not -1, which an empty batch leaves open.
    return image.reshape(*image.shape[:2], image.shape[2:].numel()).mT


def _added(total: Tensor | None, image: Tensor) -> Tensor:
    # In place: at the larger sizes a fresh tensor costs more than the addition.
    return image if total is None else total.add_(image)
