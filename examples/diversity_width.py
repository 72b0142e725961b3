"""What the width τ of the diversity term buys: a fixed point, for a small change of the objective.

The small model of MOptEq (Li et al. 2022): three branches of 32 channels, λ = 0.01, random weights at
the norm below which the equilibrium is unique. For each τ the script solves with Anderson acceleration,
then evaluates the objective of the paper, with its hard sign, at what was found.

    python examples/diversity_width.py

Takes about ten seconds.
"""

import warnings

import torch

import opteq
from opteq.solvers.base import solve_fixed_point
from opteq.system.progress import follow

CHANNELS, HIDDEN, SIZE, WEIGHT = 32, (64, 128, 128), 8, 0.01


def build(tau: float) -> opteq.MOptEq:
    """The model, the same for every `tau`."""
    torch.manual_seed(0)
    coupling = opteq.HeritageDiversity(WEIGHT, tau)
    ceiling = 0.97 / coupling.gain(CHANNELS) ** 0.5
    units = [
        opteq.OptEqUnit(opteq.Conv2d(CHANNELS, n), opteq.Conv2d(CHANNELS, n), max_norm=ceiling)
        for n in HIDDEN
    ]
    return opteq.MOptEq(units, coupling).double().eval()


def measure(tau: float, x: torch.Tensor) -> tuple[int, int, float, float, float]:
    """Evaluations to 1e-4 and 1e-10, the residual reached; `D` and the objective with the hard sign."""
    equation = build(tau).bind(x).detach()
    start = equation.first_iterate()
    _, coarse = solve_fixed_point(equation, start, opteq.Anderson(tol=1e-4, max_steps=200))
    z, fine = solve_fixed_point(equation, start, opteq.Anderson(tol=1e-10, max_steps=200))
    paper = opteq.HeritageDiversity(WEIGHT, tau=0).at(z)
    objective = equation.objective(z) + 0.5 * (paper.value(z) - equation.coupling.value(z))
    sizes = [n.abs() for n in paper.correlations(z)]
    diversity = sum(n.sum((1, 2)) - n.diagonal(dim1=1, dim2=2).sum(1) for n in sizes)
    floor = fine.residuals.nan_to_num(torch.inf).amin(1).max().item()
    return (
        int(coarse.steps.max()),
        int(fine.steps.max()),
        floor,
        diversity.mean().item(),
        objective.sum().item(),
    )


def main(taus: tuple[float, ...] = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)) -> dict[float, tuple]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, CHANNELS, SIZE, SIZE, generator=generator, dtype=torch.float64).relu()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="With tau=0")  # that is what the first row is about
        rows = {tau: measure(tau, x) for tau in follow(taus, "Widths")}
    best = min(objective for *_, objective in rows.values())
    print("     τ   evaluations to 1e-4, 1e-10   residual        D   excess of the objective")
    for tau, (coarse, fine, floor, diversity, objective) in rows.items():
        excess = (objective - best) / abs(best)
        print(f"{tau:6.0e}   {coarse:19d}, {fine:5d}   {floor:8.0e}   {diversity:6.1f}   {excess:9.1e}")
    return rows


if __name__ == "__main__":
    main()
