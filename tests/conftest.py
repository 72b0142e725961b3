import os

# Before torch is imported, and inherited by the processes that tests start: see `make unit`.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from opteq import native

# The gate gives the same answer every time, and does not measure time.
settings.register_profile("opteq", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("opteq")


@pytest.fixture(params=["C", "PyTorch"])
def way(request, monkeypatch):
    """Both ways of doing what there is compiled code for."""
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "enabled", False)
    elif not native.available():
        pytest.skip("no C compiler, or another processor")


@pytest.fixture(scope="session")
def device():
    """What tests of devices run on: the processor, unless OPTEQ_TEST_DEVICE names another, such as cuda."""
    device = torch.device(os.environ.get("OPTEQ_TEST_DEVICE", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no such device")
    return device
