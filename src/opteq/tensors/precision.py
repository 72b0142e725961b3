"""Full precision where somebody runs the rest in low precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: torch.device) -> AbstractContextManager:
    """No autocast meanwhile; where there is none, nothing: to switch it takes as long as a small product."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
