"""Shows that an installed opteq works; `python smoke.py --native` that the wheel opteq-native serves it.

It needs neither files of the repository nor a compiler.
"""

import sys

# The sources of `opteq_native` beside this file, which hold no library, are not what is installed.
del sys.path[0]

import torch  # noqa: E402

import opteq  # noqa: E402

torch.manual_seed(0)
layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Conv2d(16, 32, 3), opteq.Conv2d(3, 32, 3)))
x = torch.randn(4, 3, 16, 16, requires_grad=True)


def solved():
    """The equilibrium and its gradient."""
    solution = layer.solve(x)
    assert solution.info.converged.all()
    return solution.value.detach(), torch.autograd.grad(solution.value.square().sum(), x)[0]


status = opteq.native.status()
value, gradient = solved()
# The same with PyTorch alone, to the tolerance of a solve.
opteq.native.enabled = False
for mine, other in zip((value, gradient), solved(), strict=True):
    assert (mine - other).norm() <= 0.05 * other.norm()
opteq.certify(layer, x.detach())
print(
    f"opteq {opteq.__version__} with torch {torch.__version__} on Python {sys.version.split()[0]}: {status}"
)
if "--native" in sys.argv:
    assert status.used
    assert "from the wheel opteq-native" in status.account
