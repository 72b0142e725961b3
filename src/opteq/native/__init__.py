"""Compiled code: everything that it does is done with PyTorch as well, wherever it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.native.building import library

enabled = True
"""Whether compiled code is used at all, like `torch.backends.mkldnn.enabled`."""


@dataclass(frozen=True)
class Status:
    """Whether compiled code is used; prints as one sentence.

    Attributes:
        used: whether it is.
        account: where it comes from, or why there is none and what to do about it.
    """

    used: bool
    account: str

    def __repr__(self) -> str:
        return f"opteq {'uses' if self.used else 'goes without'} compiled code: {self.account}."


def status() -> Status:
    """Whether compiled code is used from now on, and why not. Compiles it, if that was not done yet."""
    if not enabled:
        return Status(False, "it is switched off, by opteq.native.enabled = False")
    return Status(available(), library().account)


def available() -> bool:
    """Whether compiled code is `enabled` and can be had."""
    return enabled and library().functions is not None
