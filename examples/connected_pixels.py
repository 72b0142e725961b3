"""Which pixels of a maze are connected to the red one? An equilibrium finds out, step by step.

The pretrained network `connected` (`opteq fit --config connected`) has seen mazes of 16×16 pixels. These are
its answers after `K` plain iterations in place of the equilibrium, for larger mazes too, and the share that
is right: balanced accuracy over the open pixels, 50 % for a guess. Dark is connected, light is cut off.

    python examples/connected_pixels.py [FIGURE.png]

About half a minute.
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from matplotlib.figure import Figure

import opteq
from opteq.data.connected import ConnectedPixels, mazes
from opteq.data.preprocess import Preprocess

SIZES, STEPS = (16, 32), (1, 50, 100, 200, 400)
COLOURS = np.array([[0.75, 0.85, 0.95], [0.0, 0.3, 0.6]])  # cut off, connected


@torch.no_grad()
def answers(network: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The class of every pixel after each number of iterations, and at the equilibrium."""
    x, _ = Preprocess(ConnectedPixels.normalization)((images, None))
    layer, features, found = network.body, network.stem(x), {}
    equation = layer.bind(features)
    z = equation.initial()
    for step in range(1, STEPS[-1] + 1):
        z = equation(z)
        if step in STEPS:
            found[f"K = {step}"] = network.head(z).argmax(1)
    layer.solver = replace(layer.solver, tol=1e-4, max_steps=1000)
    found["equilibrium"] = network.head(layer(features)).argmax(1)
    return found


def balanced(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Mean over the two classes of the share of their pixels that are found."""
    return float(np.mean([float((found == label)[truth == label].float().mean()) for label in (0, 1)]))


def painted(image: torch.Tensor, classes: torch.Tensor) -> np.ndarray:
    """A maze whose open pixels have the colours of their classes."""
    picture = image.movedim(0, -1).numpy() / 255
    is_white = picture.min(-1) == 1
    picture[is_white] = COLOURS[classes.numpy()[is_white]]
    return picture


def main(path: str = "connected_pixels.png", count: int = 100) -> dict[int, dict[str, float]]:
    network, scores = opteq.load("connected"), {}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for size, row in zip(SIZES, figure.subplots(len(SIZES), len(STEPS) + 3), strict=True):
        images, truth = mazes(count, size, open_share=0.62, seed=5)
        found = answers(network, images)
        scores[size] = {name: balanced(classes, truth) for name, classes in found.items()}
        print(f"{size}×{size}:", ", ".join(f"{name} {100 * s:.1f} %" for name, s in scores[size].items()))
        # A maze of which about half is connected.
        n = int(((truth == 1).sum((1, 2)) - (truth == 0).sum((1, 2))).abs().argmin())
        titles = ["maze", *(f"{name}\n{score:.0%}" for name, score in scores[size].items()), "truth"]
        pictures = [painted(images[n], classes[n]) for classes in (*found.values(), truth.clamp(max=1))]
        for ax, title, picture in zip(
            row, titles, [images[n].movedim(0, -1).numpy(), *pictures], strict=True
        ):
            ax.imshow(picture)
            ax.set_title(title, fontsize=8)
            ax.axis("off")
    figure.savefig(path, dpi=150)
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:2])
