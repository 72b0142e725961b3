"""Test images with the class a network gave them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from opteq.evaluation.record import Samples
from opteq.plots.style import RIGHT, WRONG, new_figure, styled, wrapped

# So many fit a phone.
_COLUMNS = 4
# Letters of a class name that fit above a picture.
_WIDTH = 16


@styled
def draw_samples(samples: Samples, class_names: Sequence[str]) -> Figure:
    """Draw each image below its prediction and confidence; mistakes name the true class as well."""
    count = len(samples.images)
    rows = -(-count // _COLUMNS)
    figure = new_figure(1.06 * _COLUMNS, (1.6 if max(map(len, class_names)) <= _WIDTH else 1.9) * rows)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for index, axes in enumerate(grid.flat[:count]):
        show_image(axes, samples.images[index])
        predicted, true = int(samples.predictions[index]), int(samples.labels[index])
        right = predicted == true
        name = wrapped(class_names[predicted], _WIDTH)
        title = f"{'✓' if right else '✗'} {name}\n{samples.confidences[index]:.1%}"
        if not right:
            title += f"\n{wrapped(f'true: {class_names[true]}', _WIDTH)}"
        axes.set_title(title, fontsize=7.5, fontweight="normal", color=RIGHT if right else WRONG)
    return figure


def show_image(axes: Axes, image: NDArray) -> None:
    """Show `(height, width, 1 or 3)` in [0, 1] without ticks, every pixel a square."""
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.axis("off")
