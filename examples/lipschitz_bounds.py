"""How tight Lipschitz bounds of trained equilibria are.

Trains dense layers on some of scikit-learn's digits, `‖W‖` and `‖U‖` under a ceiling, and compares, from
image to equilibrium, `equilibrium_lipschitz`, Proposition 3 of Li et al. 2023 as printed (infinite where it
does not apply), and the largest ratio `‖Δz‖/‖Δx‖` over 10,000 pairs and along gradient ascent.

    python examples/lipschitz_bounds.py

Takes about half a minute.
"""

import math
from contextlib import suppress

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import opteq
from opteq.errors import ConfigError
from opteq.theory.lipschitz import equilibrium_lipschitz, published_lipschitz

STATE, MIDDLE, PIXELS = 32, 48, 64


def train(kind: type, ceiling: float, x: torch.Tensor, y: torch.Tensor, steps: int) -> opteq.EquilibriumLayer:
    torch.manual_seed(0)
    W, U = opteq.Dense(STATE, MIDDLE), opteq.Dense(PIXELS, MIDDLE)
    options = {"gamma": 0.05} if kind is opteq.GaussianMap else {}
    unit = kind(W, U, bias=False, max_norm=ceiling, **options)
    layer = opteq.EquilibriumLayer(unit, opteq.Anderson(1e-7, 500), opteq.Implicit(1e-7, 200)).double()
    head = torch.nn.Linear(STATE, 10).double()
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(head(layer(x)), y).backward()
        optimizer.step()
        U.weight.data /= max(1.0, torch.linalg.matrix_norm(U.weight.detach(), 2).item() / ceiling)
    return layer


def ratios(layer: opteq.EquilibriumLayer, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((layer(a) - layer(b)).norm(dim=1) / (a - b).norm(dim=1)).nan_to_num()


def largest_ratios(layer: opteq.EquilibriumLayer, x: torch.Tensor, pairs: int, steps: int) -> list[float]:
    """Over pairs of images and of images and their neighbours, and along gradient ascent on 64 pairs."""
    first, second = x[torch.randint(len(x), (2, pairs))]
    second[::2] = first[::2] + 0.01 * torch.randn_like(first[::2])
    with torch.no_grad():
        sampled = ratios(layer, first, second).max().item()
    a, b = (t[:64].clone().requires_grad_() for t in (first, second))
    optimizer, found = torch.optim.Adam([a, b], lr=2e-2), []
    for _ in range(steps):
        found.append(ratios(layer, a, b))
        optimizer.zero_grad()
        (-found[-1].sum()).backward()
        optimizer.step()
    return [sampled, torch.stack(found).max().item()]


def main(pairs: int = 10_000, steps: int = 100) -> list[tuple[float, ...]]:
    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data[:500]).double() / 16, torch.from_numpy(bunch.target[:500])
    print("            ceiling     ours  printed    pairs   ascent")
    rows = []
    for kind in (opteq.OptEqUnit, opteq.GaussianMap):
        for ceiling in (0.9, 0.6):
            layer = train(kind, ceiling, x, y, steps)
            ours, printed = equilibrium_lipschitz(layer.map, x).value.item(), math.inf
            with suppress(ConfigError):
                printed = published_lipschitz(layer, x).value.item()
            rows.append((ours, printed, *largest_ratios(layer, x, pairs, steps)))
            print(f"{kind.__name__:12}{ceiling:7.1f}", *(f"{value:8.2f}" for value in rows[-1]))
    return rows


if __name__ == "__main__":
    main()
