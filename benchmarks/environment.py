"""What the numbers were measured on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from opteq import native


def environment(device: torch.device) -> dict[str, str]:
    """Hardware, threads and versions."""
    facts = {
        "processor": _processor(),
        "cores used": str(torch.get_num_threads()),
        "system": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "compiled code": "yes" if native.available() else "no",
    }
    if device.type == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name(device)
    return facts | {name: _version(name) for name in ("torch", "torchdeq", "opteq")}


def _processor() -> str:
    # platform.processor() is empty or says only "x86_64" on Linux.
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
