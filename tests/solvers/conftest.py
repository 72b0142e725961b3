"""What the tests of this folder share."""

import pytest

from opteq import native
from opteq.solvers import rows


@pytest.fixture(params=["C", "PyTorch"])
def way(request, monkeypatch):
    """Both ways of doing what solvers do with rows."""
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "enabled", False)
    elif rows.compiled() is None:
        pytest.skip("no C compiler, or another processor")
