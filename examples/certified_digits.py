"""Train a classifier on handwritten digits, then certify its equilibria and its predictions.

The certificates say how far each computed equilibrium can be from the true one, and within which distance
of an image no other image is classified differently.

    python examples/certified_digits.py

Takes about ten seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import opteq
from opteq.system.progress import follow


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images with pixels in [0, 1] and their labels, in random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    return torch.tensor(digits.images).float()[order] / 16, torch.tensor(digits.target)[order]


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> nn.Sequential:
    # A low ceiling on ‖W‖ and a head that weight decay keeps small give large certified radii.
    unit = opteq.OptEqUnit(opteq.Dense(48, 96), opteq.Dense(64, 96), max_norm=0.7)
    layer = opteq.EquilibriumLayer(unit, opteq.Anderson(tol=1e-3))
    model = nn.Sequential(nn.Flatten(), layer, nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.3)
    for _ in follow(range(epochs), "Training"):
        for rows in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def main(epochs: int = 30) -> None:
    torch.manual_seed(0)
    images, labels = load()
    model = train(images[:1437], labels[:1437], epochs)
    images, labels = images[1437:], labels[1437:]
    flatten, layer, _ = model

    found = opteq.certify(layer, flatten(images))
    gap = found.objective - found.objective_at_reference
    print(f"T contracts with constant {found.contraction.value.max():.3f}")
    print(f"relative residual        at most {found.residual.max():.1e}")
    print(f"distance to equilibrium  at most {found.distance.value.max():.1e}, certified")
    print(f"                         about   {found.distance_to_reference.value.max():.1e}, measured")
    print(f"objective above its minimum by   {gap.max():.1e} at most")

    correct = model(images).argmax(1) == labels
    radius = opteq.robust_radius(model, images)
    print(f"accuracy {correct.float().mean():.1%}")
    for size in (0.05, 0.1, 0.2, 0.4):
        safe = (correct & (radius > size)).float().mean()
        print(f"accuracy {safe:.1%} certified against every change of Euclidean norm {size}")


if __name__ == "__main__":
    main()
