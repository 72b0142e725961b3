"""Which parts of images speak for their predictions."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from opteq.evaluation.record import Samples
from opteq.plots.equilibria import name_row
from opteq.plots.samples import show_image
from opteq.plots.style import RIGHT, WRONG, literal, new_figure, styled


@styled
def draw_saliency(samples: Samples, maps: NDArray, class_names: Sequence[str]) -> Figure:
    """Draw each image below its prediction, and below it the image under its map.

    Args:
        samples: the images and what was said about them.
        maps: `(n, height, width)` of at least zero; each has a scale of its own.
        class_names: one name per class.
    """
    count = len(samples.images)
    figure = new_figure(1.35 * count + 0.9, 3.7)
    grid = figure.subplots(2, count, squeeze=False)
    for column in range(count):
        predicted, true = int(samples.predictions[column]), int(samples.labels[column])
        above, below = grid[:, column]
        show_image(above, samples.images[column])
        show_image(below, samples.images[column].mean(2, keepdims=True))
        largest = float(maps[column].max()) or 1.0
        below.imshow(maps[column] / largest, cmap="inferno", vmin=0, vmax=1, alpha=0.65)
        title = f"{literal(class_names[predicted], longest=14)}\n{samples.confidences[column]:.1%}"
        if predicted != true:
            title += f"\ntrue: {literal(class_names[true], longest=12)}"
        colour = RIGHT if predicted == true else WRONG
        above.set_title(title, fontsize=7.5, fontweight="normal", color=colour)
    name_row(grid[0, 0], "image")
    name_row(grid[1, 0], "Grad-CAM")
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), "inferno"), ax=list(grid[-1]), location="bottom", aspect=40
    )
    bar.set_label("share of the largest value in the image")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure
