"""What results print."""

import torch

from opteq import Anderson, Conv2d, EquilibriumLayer, OptEqUnit, certify
from opteq.results import Certificate, Solution, SolveInfo


def test_large_tensors_are_described():
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(4, 8), Conv2d(3, 8)), Anderson(tol=1e-4))
    x = torch.rand(9, 3, 8, 8)
    solution = layer.solve(x, trace=True)
    assert "value=tensor of shape (9, 4, 8, 8), torch.float32" in repr(solution)
    certificate = certify(layer, x)
    assert "state=tensor of shape (9, 4, 8, 8), torch.float32" in repr(certificate)
    for result in (solution, certificate):
        assert len(repr(result)) < 2500


def test_few_numbers_are_shown():
    assert repr(Certificate(torch.tensor([0.5, 2.0]), "bound")) == (
        "Certificate(value=tensor([0.5000, 2.0000]), kind='bound', assumptions=())"
    )
    info = SolveInfo(torch.ones(1, 2), torch.tensor([2]), torch.tensor([True]), 2)
    branches = (torch.zeros(2, 3, 4), torch.zeros(1))
    assert repr(Solution(branches, info, branches[0])).startswith(
        "Solution(value=(tensor of shape (2, 3, 4), torch.float32, tensor([0.])), info=SolveInfo("
    )
