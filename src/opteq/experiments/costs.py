"""What a trained network costs: time and memory of its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from opteq.data.base import ImageDataModule

REPEATS = 9


def step_times(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """Medians over repetitions on one test batch, in milliseconds, after a first that does not count.

    `inference_ms` is a forward pass in eval mode without gradients, `step_ms` a forward and a backward
    pass in training mode, and `backward_ms` the backward pass alone.
    """
    images, labels = next(iter(data.test_dataloader()))
    network.eval()
    with torch.no_grad():
        inference = 1000 * median([_seconds(lambda: network(images)) for _ in range(REPEATS + 1)][1:])
    network.train()
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        loss = cross_entropy(network(images), labels)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        times.append((end - start, end - middle))
    step, backward = (1000 * median(column) for column in zip(*times[1:], strict=True))
    return {"inference_ms": inference, "step_ms": step, "backward_ms": backward}


def step_memory(network: nn.Module, data: ImageDataModule) -> dict[str, float]:
    """`step_mb`: the most megabytes that a training step on one test batch holds beside the weights."""
    images, labels = next(iter(data.test_dataloader()))
    network.train()

    def step() -> None:
        network.zero_grad()
        cross_entropy(network(images), labels).backward()

    step()  # what is made once stays out of it
    return {"step_mb": peak_memory(step, images.device) / 1e6}


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `step` holds at once beyond what was allocated before.

    Counted from the events of PyTorch's allocator, which also serves the scratch space of its
    convolutions. Resident size would add the pages of libraries, what earlier work left behind and what
    the C library keeps for later.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, held)
    return peak


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
