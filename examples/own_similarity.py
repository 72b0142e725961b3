"""A kernel equilibrium model from a similarity of one's own, trained on handwritten digits.

The similarity is that of Student's t distribution: like the Gaussian one it attends most to the pixels
where W y is already near the injection c, but its weights 1/(1 + ‖c - W y‖²) never vanish. Writing it
down is all it takes; the equilibrium map, its hidden objective and all gradients follow. Takes a minute.

    python examples/own_similarity.py [FIGURE.png]
"""

import sys

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import opteq
from opteq.system.progress import follow


class Student(nn.Module):
    """`S(y; c) = -½ Σ_p log(1 + ‖(c - W y)_p‖²)`, a sum over pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.W = opteq.Conv2d(channels, channels)

    def squares(self, y: Tensor, c: Tensor) -> Tensor:
        W = self.W.bind(tuple(y.shape[1:]), ceiling=0.97)  # ‖W‖ < 1 makes a contraction
        return (c - W(y)).square().sum(1)

    def forward(self, y: Tensor, c: Tensor) -> Tensor:
        return -0.5 * torch.log1p(self.squares(y, c)).sum((1, 2))


def train(images: Tensor, labels: Tensor, epochs: int) -> nn.Sequential:
    similarity = opteq.SimilarityMap(Student(24), U=opteq.Conv2d(1, 24), channels=24)
    layer = opteq.EquilibriumLayer(similarity, opteq.Anderson(tol=1e-3))
    head = [nn.BatchNorm2d(24), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(384, 10)]
    model = nn.Sequential(layer, *head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    for _ in follow(range(epochs), "Training"):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def draw(layer: opteq.EquilibriumLayer, images: Tensor, path: str) -> None:
    layer, images = layer.double(), images.double()
    similarity, energy = layer.bind(images).similarity, layer.solve(images, trace=True).trace.energy
    weights = 1 / (1 + similarity.module.squares(layer(images), similarity.injection))
    upper, lower = Figure(figsize=(8, 5), layout="constrained").subfigures(2, 1, height_ratios=[1.3, 1])
    axes = upper.subplots(2, len(images), subplot_kw={"xticks": [], "yticks": []})
    for column, image, weight in zip(axes.T, images[:, 0], weights, strict=True):
        column[0].imshow(image.numpy(), cmap="gray_r")
        shown = column[1].imshow(weight.numpy(), vmin=0, vmax=1)
    upper.colorbar(shown, ax=axes[1], label="weight of a pixel")
    axis = lower.subplots()
    axis.semilogy((energy - energy[:, -1:])[:, :15].T.numpy())
    axis.set(xlabel="plain iteration", ylabel="objective above its limit", ylim=(1e-13, None))
    upper.figure.savefig(path, dpi=150)


def main(path: str = "own_similarity.png", epochs: int = 20) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images, labels = torch.tensor(digits.images).float()[order, None] / 16, torch.tensor(digits.target)[order]
    model = train(images[:1437], labels[:1437], epochs)
    correct = model(images[1437:]).argmax(1) == labels[1437:]
    print(f"test accuracy {correct.float().mean():.1%}")
    draw(model[0], images[1437:1443], path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
