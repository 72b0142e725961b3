"""Which solver finds a gradient, and what is reported of the computation."""

from itertools import pairwise

import pytest
import torch

from opteq import Implicit, Unrolled
from opteq.gradients import implicit
from tests.conformance.reference import random
from tests.maps.problems import STATE, dense_unit, inputs

SOLVERS = {
    "auto": "conjugate_gradients",
    "cg": "conjugate_gradients",
    "anderson": "solve_fixed_point",
    "gmres": "gmres",
}


@pytest.mark.parametrize("method", SOLVERS)
def test_the_method_says_which_solver_runs(method, monkeypatch):
    ran = []

    def watched(name):
        original = getattr(implicit, name)
        return lambda *args, **options: ran.append(name) or original(*args, **options)

    for name in {*SOLVERS.values()}:
        monkeypatch.setattr(implicit, name, watched(name))
    equation, reports = dense_unit().bind(inputs()).detach(), []
    z, g = random(4, STATE), random(4, STATE, seed=1)
    Implicit(method=method).pullback(equation, z, g, reports.append)
    assert ran == [SOLVERS[method]]
    (info,) = reports
    assert info.converged.tolist() == [True] * 4


def test_unrolled_iterations_report_every_residual():
    equation = dense_unit().bind(inputs()).detach()
    iterates = [equation.initial()]
    for _ in range(4):
        iterates.append(equation(iterates[-1]))
    state, info = Unrolled(4).run(equation)
    torch.testing.assert_close(state, iterates[-1])
    residuals = [(new - old).norm(dim=1) / new.norm(dim=1) for old, new in pairwise(iterates)]
    torch.testing.assert_close(info.residuals, torch.stack(residuals, dim=1))
    assert info.steps.dtype == torch.long
    assert info.steps.tolist() == [4] * 4
    assert info.evaluations == 4
    assert info.converged.tolist() == [True] * 4


class Growing:
    """The second sample is 1, 1e200, and then too large for a number."""

    def initial(self):
        return torch.zeros(2, 1, dtype=torch.float64)

    def first_iterate(self):
        return self(self.initial())

    def __call__(self, state):
        return torch.tensor([[0.5], [1e200]], dtype=torch.float64) * state + 1


def test_an_unrolled_sample_counts_as_converged_as_long_as_it_is_finite():
    for steps, finite in ((2, True), (3, False), (4, False)):
        _, info = Unrolled(steps).run(Growing())
        assert info.converged.tolist() == [True, finite]
        assert info.steps.tolist() == [steps] * 2
