"""What a process runs on."""

import platform
from pathlib import Path

import torch

PACKAGES = ("opteq", "torch", "torchvision", "lightning", "torchmetrics", "jsonargparse")
"""What a result depends on, by the names under which versions are known."""


def hardware() -> dict[str, str]:
    """Processor, the cores that PyTorch uses, and the accelerator if there is one."""
    known = {"processor": processor(), "cores": str(torch.get_num_threads())}
    return known | ({"accelerator": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def processor() -> str:
    """What the processor calls itself."""
    # platform.processor() is empty or says only "x86_64" on Linux.
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
