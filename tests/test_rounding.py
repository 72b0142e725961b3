import threading

import pytest
import torch

from opteq import Anderson, Conv2d, EquilibriumLayer, Implicit, OptEqUnit
from opteq.rounding import tolerated, tolerating


def test_what_is_tolerated_ends_with_its_block():
    assert tolerated() == 0
    with tolerating(1e-3):
        with tolerating(1e-5):
            assert tolerated() == 1e-5
        assert tolerated() == 1e-3
        with pytest.raises(KeyError), tolerating(1e-2):
            raise KeyError
        assert tolerated() == 1e-3
    assert tolerated() == 0


def test_threads_do_not_see_each_others():
    seen = []
    with tolerating(1e-3):
        thread = threading.Thread(target=lambda: seen.append(tolerated()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_products_of_a_solve_are_told_its_tolerance():
    seen = []

    class Watched(Conv2d):
        def matvec(self, weights, x):
            seen.append(tolerated())
            return super().matvec(weights, x)

    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Watched(2, 3), Conv2d(1, 3)), Anderson(1e-3), Implicit(1e-2))
    x = torch.randn(2, 1, 4, 4)
    layer(x)  # the norm is estimated once, without any tolerance
    seen.clear()
    value = layer(x)
    assert set(seen) == {0.0, 1e-3}
    seen.clear()
    value.sum().backward()
    assert set(seen) == {1e-2}
    seen.clear()
    layer.bind(x).objective(value.detach())
    assert set(seen) == {0.0}
