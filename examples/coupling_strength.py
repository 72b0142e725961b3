"""How fast a multi-branch equilibrium is reached for several weights λ (Li et al. 2022, Figure 4).

Three branches of 32 channels with `‖W‖ = 0.9`. Below `λ = (1/‖W‖² - 1)/(C - 1)` there is one equilibrium, and
conjugate gradients solve its adjoint equation; the paper's own condition `λ ≤ 1/C` is weaker. The figure
shows the relative residual per evaluation, of plain iteration and of Anderson acceleration. Solid lines
are within the bound.

    python examples/coupling_strength.py [FIGURE.png]

Takes about ten seconds.
"""

import sys
import warnings

import torch
from matplotlib.figure import Figure

import opteq
from opteq.solvers.base import Solver, solve_fixed_point
from opteq.system.progress import follow

CHANNELS, HIDDEN, SIZE, NORM = 32, (64, 64, 64), 8, 0.9
WEIGHTS = (0.001, 0.005, 0.01, 0.02, 0.05)


def build(weight: float) -> opteq.MOptEq:
    """The model, the same for every `weight`; the norm of each `W` is `NORM` exactly."""
    torch.manual_seed(0)
    units = []
    for n in HIDDEN:
        W = opteq.Conv2d(CHANNELS, n).double()
        W.weight.data *= NORM / W.norm((CHANNELS, SIZE, SIZE))
        units.append(opteq.OptEqUnit(W, opteq.Conv2d(CHANNELS, n).double(), max_norm=None))
    return opteq.MOptEq(units, opteq.HeritageDiversity(weight)).double().eval()


def residuals(weight: float, x: torch.Tensor, solver: Solver) -> torch.Tensor:
    """Mean relative residual of the batch at each evaluation."""
    equation = build(weight).bind(x).detach()
    _, info = solve_fixed_point(equation, equation.first_iterate(), solver)
    # A sample that has stopped counts with its last residual.
    return info.residuals.nan_to_num(solver.tol).log().mean(0).exp()


def main(path: str = "coupling_strength.png", steps: int = 60) -> dict[float, tuple[float, float]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, CHANNELS, SIZE, SIZE, generator=generator, dtype=torch.float64).relu()
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    reached = {}
    for number, weight in enumerate(follow(WEIGHTS, "Weights")):
        bound = NORM**2 * opteq.HeritageDiversity(weight).gain(CHANNELS)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is not below 1")  # the dashed lines
            curves = [residuals(weight, x, solver(1e-10, steps)) for solver in (opteq.Picard, opteq.Anderson)]
        for ax, curve in zip(axes, curves, strict=True):
            style = "-" if bound < 1 else "--"
            ax.semilogy(range(1, len(curve) + 1), curve, style, color=f"C{number}", label=f"λ = {weight:g}")
        reached[weight] = (curves[0][-1].item(), curves[1][-1].item())
        plain, mixed = reached[weight]
        print(
            f"λ = {weight:5g}, ‖W‖²(1 + λ(C-1)) = {bound:.3f}: {plain:.0e} plain, {mixed:.0e} with Anderson"
        )
    for ax, title in zip(axes, ("Plain iteration", "Anderson acceleration"), strict=True):
        ax.set(title=title, xlabel="evaluation")
    axes[0].set_ylabel("relative residual")
    axes[1].legend()
    figure.savefig(path, dpi=150)
    return reached


if __name__ == "__main__":
    main(*sys.argv[1:2])
