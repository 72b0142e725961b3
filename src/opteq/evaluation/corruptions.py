"""Accuracy on corrupted images, made of any test set or read from CIFAR-10-C and CIFAR-100-C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError
from opteq.evaluation.corrupting.corrupt import CORRUPTIONS, SEVERITIES, corrupt
from opteq.evaluation.parts import Parts
from opteq.evaluation.passes import Spread, device_of, evaluating, share_of

_BATCH = 256

Batches = Iterable[Sequence[Tensor]]


def corrupted_accuracy(
    network: nn.Module,
    source: Path | Batches,
    normalization: Normalization,
    images: int | None = None,
    parts: Parts | None = None,
) -> dict[str, tuple[float, ...]]:
    """Accuracy under each of `CORRUPTIONS`, for severities 1 to 5 (Hendrycks and Dietterich 2019).

    What is made has the same random numbers in every call, whatever the network.

    Args:
        network: maps images to logits; evaluated where its parameters are.
        source: batches `(images, labels)` of clean images, normalised, of one or three channels, that are
            corrupted as `opteq.evaluation.corrupting.corrupt` says; or the folder of the unpacked archive,
            with an array `<corruption>.npy` of bytes `(5n, 32, 32, 3)` for each corruption, the severities
            one after the other, and the classes in `labels.npy`.
        normalization: mean and standard deviation that the network's images have.
        images: at most so many, evenly spread over all; None for all.
        parts: keeps what is known; nothing is kept unless given.

    Raises:
        ConfigError: if an array is missing, damaged or of another shape, or images have two channels or more
            than three.
    """
    if isinstance(source, Path):
        corrupted = _Published(source)
        share = 1.0 if images is None else min(1.0, images / corrupted.count)
    else:
        corrupted = _Made(source, normalization)
        share = share_of(source, images)
    parts = parts or Parts()
    preprocess = Preprocess(Normalization(*normalization))
    places = {f"{name} {s}": (name, s) for name in CORRUPTIONS for s in range(1, SEVERITIES + 1)}

    def accuracy(part: str) -> float:
        name, severity = places[part]
        device = device_of(network)
        hits = samples = 0
        with evaluating(network, device) as dtype:
            for batch in Spread(corrupted.batches(name, severity), share):
                pixels, labels = preprocess(batch)
                answers = network(pixels.to(device=device, dtype=dtype)).argmax(1).cpu()
                hits += int((answers == labels).sum())
                samples += len(labels)
        return hits / max(samples, 1)

    known = parts.measure(list(places), accuracy)
    return {
        name: tuple(known[f"{name} {severity}"] for severity in range(1, SEVERITIES + 1))
        for name in CORRUPTIONS
    }


class _Made:
    """Batches of clean images, corrupted."""

    def __init__(self, clean: Batches, normalization: Normalization) -> None:
        self._clean = clean
        self._mean, self._std = (torch.as_tensor(v).reshape(-1, 1, 1) for v in normalization)

    def batches(self, name: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes `(batch, channels, height, width)` and labels."""
        random = RandomState([CORRUPTIONS.index(name), severity])
        for images, labels in self._clean:
            pixels = ((images.cpu() * self._std + self._mean) * 255).round().clamp(0, 255).byte()
            made = [_corrupt(image.permute(1, 2, 0).numpy(), name, severity, random) for image in pixels]
            yield torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2), labels.cpu()


def _corrupt(image: NDArray[np.uint8], name: str, severity: int, random: RandomState) -> NDArray[np.uint8]:
    """A corrupted image of as many channels; a grey one is taken for one of three equal colours."""
    channels = image.shape[2]
    if channels not in (1, 3):
        raise ConfigError(f"Expected images of 1 or 3 channels to corrupt, got {channels}.")
    corrupted = corrupt(image.repeat(3 // channels, 2), name, severity, random)
    return corrupted if channels == 3 else np.asarray(Image.fromarray(corrupted).convert("L"))[:, :, None]


class _Published:
    """The published arrays."""

    def __init__(self, folder: Path) -> None:
        labels = _read(folder / "labels.npy")
        if labels.ndim != 1 or len(labels) == 0 or len(labels) % SEVERITIES:
            raise ConfigError(
                f"Expected {folder / 'labels.npy'} to hold classes for {SEVERITIES} severities,"
                f" got an array of shape {labels.shape}."
            )
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self.count = len(labels) // SEVERITIES
        # All are opened first: a missing one should not cost a pass over the others.
        self._arrays = {name: _images(folder / f"{name}.npy", len(labels)) for name in CORRUPTIONS}

    def batches(self, name: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes `(batch, 3, 32, 32)` and labels."""
        start, stop = (severity - 1) * self.count, severity * self.count
        for first in range(start, stop, _BATCH):
            rows = slice(first, min(first + _BATCH, stop))
            yield torch.from_numpy(np.array(self._arrays[name][rows])).permute(0, 3, 1, 2), self._labels[rows]


def _images(path: Path, count: int) -> NDArray:
    array = _read(path)
    if array.shape != (count, 32, 32, 3) or array.dtype != np.uint8:
        raise ConfigError(
            f"Expected {path} to hold bytes of shape ({count}, 32, 32, 3), one image per label, got"
            f" {array.dtype} of shape {array.shape}."
        )
    return array


def _read(path: Path) -> NDArray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no {path}; unpack CIFAR-10-C (https://zenodo.org/records/2535967) beside the data set."
        ) from error
    except (ValueError, EOFError, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}); unpack the archive again.") from error
