"""What a report of a fault should say of the machine and of what is installed."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from opteq import native
from opteq.system.hardware import PACKAGES

OPTIONAL = ("opteq-native", "timm", "onnxruntime")


def info() -> dict[str, str]:
    """Versions, devices, threads, and whether compiled code is used, by what they are called."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **{name: _version(name) for name in (*PACKAGES, *OPTIONAL)},
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "processors": f"{os.cpu_count()}, PyTorch uses {torch.get_num_threads()}",
        "accelerators": ", ".join(devices) or "none that PyTorch can use",
        "compiled code": native.status().account,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
