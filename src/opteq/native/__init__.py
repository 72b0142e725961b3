"""Compiled code: everything that it does is done with PyTorch as well, wherever it cannot be had."""

from __future__ import annotations

from opteq.native.building import Library, library

enabled = True
"""Whether compiled code is used at all, like `torch.backends.mkldnn.enabled`."""


def available() -> bool:
    """Whether compiled code can be had and is `enabled`."""
    return enabled and library().functions is not None


def status() -> Library:
    """Where the compiled code comes from, or why there is none; made at once if it was not yet."""
    return library()
