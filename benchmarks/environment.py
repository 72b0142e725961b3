"""What the numbers were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from opteq import native
from opteq.system.hardware import processor


def environment(device: torch.device) -> dict[str, str]:
    """Hardware, threads and versions."""
    facts = {
        "processor": processor(),
        "cores used": str(torch.get_num_threads()),
        "system": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "compiled code": "yes" if native.available() else "no",
    }
    if device.type == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name(device)
    return facts | {name: _version(name) for name in ("torch", "torchdeq", "opteq")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
