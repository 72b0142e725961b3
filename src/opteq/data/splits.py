"""Splitting a labelled set into two parts with the same class proportions."""

import torch
from torch import Tensor


def stratified_split(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pick `count` samples so that every class keeps its share of the set.

    Class `c` gets `count · n_c / n` samples rounded down; the samples that rounding leaves over go
    to the classes with the largest remainders. The split depends on the arguments alone.

    Args:
        labels: Class of every sample, shape (n,).
        count: Number of samples to pick, between 0 and n.
        seed: Seed of the choice.

    Returns:
        Sorted indices of the picked samples, shape (count,), and of the others, shape (n - count,).
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.bincount(labels).double() * count / len(labels)
    quota = shares.floor().long()
    left_over = count - int(quota.sum())
    quota[torch.argsort(quota - shares, stable=True)[:left_over]] += 1

    picked = torch.zeros(len(labels), dtype=torch.bool)
    for label, wanted in enumerate(quota.tolist()):
        members = torch.nonzero(labels == label).flatten()
        order = torch.randperm(len(members), generator=generator)
        picked[members[order[:wanted]]] = True
    return torch.nonzero(picked).flatten(), torch.nonzero(~picked).flatten()
