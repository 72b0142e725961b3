"""Accuracy on corrupted images, from the published arrays of CIFAR-10-C and CIFAR-100-C."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError
from opteq.evaluation.passes import evaluating

CORRUPTIONS = (
    "brightness",
    "contrast",
    "defocus_blur",
    "elastic_transform",
    "fog",
    "frost",
    "gaussian_blur",
    "gaussian_noise",
    "glass_blur",
    "impulse_noise",
    "jpeg_compression",
    "motion_blur",
    "pixelate",
    "saturate",
    "shot_noise",
    "snow",
    "spatter",
    "speckle_noise",
    "zoom_blur",
)
SEVERITIES = 5
_BATCH = 256


def corrupted_accuracy(
    network: nn.Module, folder: Path, normalization: Normalization
) -> dict[str, tuple[float, ...]]:
    """Accuracy under each corruption, for severities 1 to 5 (Hendrycks and Dietterich 2019).

    Args:
        network: maps images `(batch, 3, 32, 32)` to logits; evaluated where its parameters are.
        folder: the unpacked archive, with an array `<corruption>.npy` of bytes `(5n, 32, 32, 3)` for each of
            `CORRUPTIONS`, the severities one after the other, and the classes in `labels.npy`.
        normalization: mean and standard deviation that the network's images have.

    Raises:
        ConfigError: if an array is missing, damaged or of another shape.
    """
    labels = _read(folder / "labels.npy")
    if labels.ndim != 1 or len(labels) == 0 or len(labels) % SEVERITIES:
        raise ConfigError(
            f"Expected {folder / 'labels.npy'} to hold classes for {SEVERITIES} severities,"
            f" got an array of shape {labels.shape}."
        )
    paths = {name: folder / f"{name}.npy" for name in CORRUPTIONS}
    # All are opened first: a missing one should not cost a pass over the others.
    arrays = {name: _images(path, len(labels)) for name, path in paths.items()}
    targets = torch.from_numpy(labels.astype(np.int64))
    return {
        name: tuple(
            _hits(network, array, targets, normalization).unflatten(0, (SEVERITIES, -1)).mean(1).tolist()
        )
        for name, array in arrays.items()
    }


def _hits(network: nn.Module, array: NDArray, labels: Tensor, normalization: Normalization) -> Tensor:
    """`(5n,)` 1 where the prediction is right, 0 elsewhere."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    preprocess = Preprocess(normalization)
    hits = []
    with evaluating(network, device) as dtype:
        for start in range(0, len(array), _BATCH):
            pixels = torch.from_numpy(np.array(array[start : start + _BATCH])).permute(0, 3, 1, 2)
            images, truth = preprocess((pixels, labels[start : start + _BATCH]))
            answers = network(images.to(device=device, dtype=dtype)).argmax(1).cpu()
            hits.append((answers == truth).double())
    return torch.cat(hits)


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
