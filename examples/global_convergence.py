"""Gradient descent on an over-parametrised deep OptEq finds a global minimum (Xie et al. 2022, Theorem 6).

The activation is smooth and strongly monotone, the state is wider than there are samples. The loss then
falls to zero at a linear rate, while the norms of the weights hardly move: they stay below 1 by themselves,
so that the equilibrium exists and is unique all along. A narrow model, trained in the same way, has no
such guarantee, and is still far from its minimum when the wide one has reached zero to rounding.

    python examples/global_convergence.py [FIGURE.png]

Takes about ten seconds.
"""

import sys

import torch
from matplotlib.figure import Figure

import opteq
from opteq.system.progress import follow

SAMPLES, INPUTS, OUTPUTS, UNITS = 10, 32, 2, 3


def build(state: int, hidden: int) -> torch.nn.Sequential:
    """Three units `n × m` with singular values between 0.1 and 0.5, and a linear output."""
    units = []
    for _ in range(UNITS):
        W, U = opteq.Dense(state, hidden), opteq.Dense(INPUTS, hidden)
        torch.nn.init.normal_(W.weight, std=0.5 / (state**0.5 + hidden**0.5))
        torch.nn.init.normal_(U.weight, std=3 / INPUTS**0.5)
        units.append(opteq.OptEqUnit(W, U, "strongly_monotone", max_norm=None))
    layer = opteq.EquilibriumLayer(opteq.DeepOptEq(units, alpha=0.8), opteq.Anderson(tol=1e-6))
    head = torch.nn.Linear(state, OUTPUTS, bias=False)
    torch.nn.init.normal_(head.weight, std=0.3)
    return torch.nn.Sequential(layer, head).double()


def train(state: int, hidden: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain gradient descent; the loss `(steps,)` and the norms of the weights `(steps, UNITS)`."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, INPUTS).double(), torch.randn(SAMPLES, OUTPUTS).double()
    model = build(state, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    losses, norms = [], []
    for _ in follow(range(steps), "Training"):
        loss = (model(x) - y).square().sum() / (2 * SAMPLES)
        losses.append(loss.item())
        norms.append([torch.linalg.matrix_norm(unit.W.weight.detach(), 2) for unit in model[0].map.units])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.tensor(losses), torch.tensor(norms)


def main(path: str = "global_convergence.png", steps: int = 300) -> None:
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for state, hidden, label in ((60, 120, "over-parametrised"), (3, 4, "narrow")):
        losses, norms = train(state, hidden, steps)
        print(f"{label}: loss {losses[0]:.2g} → {losses[-1]:.2g}, largest ‖W‖ {norms.max():.3f}")
        left.semilogy(losses, label=f"{label}, {state} states")
        if label == "over-parametrised":
            right.plot(norms.log(), label=[f"$W_{i}$" for i in range(1, UNITS + 1)])
    left.set(title="Training loss", xlabel="step of gradient descent")
    left.legend(loc="lower left")
    right.set(title="log ‖W‖, over-parametrised", xlabel="step of gradient descent", ylim=(-1, 0.1))
    right.axhline(0, color="grey", linestyle=":", linewidth=1)
    right.legend(loc="center right")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:2])
