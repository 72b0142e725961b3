import os
import shutil

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


# Milliseconds that a browser is waited for; machines that test are busy.
PATIENCE = 120_000


@pytest.fixture(scope="module")
def browser():
    """A browser to look at pages in, where there is one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no Chromium to look at pages in")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def device():
    """What tests of devices run on: the processor, unless OPTEQ_TEST_DEVICE names another, such as cuda."""
    device = torch.device(os.environ.get("OPTEQ_TEST_DEVICE", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no such device")
    return device
