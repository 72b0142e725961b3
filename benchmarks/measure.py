"""How time and memory are measured."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.contenders import Contender
from opteq.experiments.costs import peak_memory


@dataclass
class Times:
    """Seconds of every run."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median of forward and backward together."""
        return statistics.median(map(sum, zip(self.forward, self.backward, strict=True)))


class Deadline:
    """A moment after which no further measurement is begun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def passed(self) -> bool:
        """Whether it is over."""
        return time.perf_counter() >= self._end


def interleave(contenders: Sequence[Contender], runs: int) -> list[Times]:
    """Time one step of every contender in turn, `runs` times over.

    Interleaved, so that whatever else the machine does falls on all alike, and in a new order every
    time, so that no contender always meets the caches that the same other one left. One untimed round
    comes first.
    """
    times = [Times() for _ in contenders]
    order = list(range(len(contenders)))
    shuffle = random.Random(0).shuffle
    for run in range(-1, runs):
        shuffle(order)
        for index in order:
            forward, backward = time_step(contenders[index])
            if run >= 0:
                times[index].forward.append(forward)
                times[index].backward.append(backward)
    return times


def time_step(contender: Contender) -> tuple[float, float]:
    """Seconds of the forward and of the backward half of one step."""
    synchronize = synchronizer(contender.problem.device)
    contender.reset()
    with _no_garbage_collection():
        synchronize()
        start = time.perf_counter()
        value = contender.forward()
        synchronize()
        middle = time.perf_counter()
        contender.backward(value)
        synchronize()
        end = time.perf_counter()
    return middle - start, end - middle


def step_memory(contender: Contender) -> int:
    """Peak memory of one training step."""
    contender.reset()
    return peak_memory(lambda: contender.backward(contender.forward()), contender.problem.device)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done its work."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
