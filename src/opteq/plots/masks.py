"""Scenes with the classes of their pixels."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from opteq.evaluation.scenerecord import Scenes
from opteq.plots.equilibria import name_row
from opteq.plots.samples import show_image
from opteq.plots.style import BLUE, ORANGE, literal, new_figure, styled

# Beyond this number of classes a legend would be larger than the pictures.
_MOST_NAMES = 40
_WIDTH = 9.6


@styled
def draw_scenes(scenes: Scenes, class_names: Sequence[str]) -> Figure:
    """Draw one column per image: the image, the classes of its pixels (white: none), the predicted ones."""
    count, classes = len(scenes.images), len(class_names)
    height, width = scenes.labels.shape[1:]
    named = classes <= _MOST_NAMES
    column = (_WIDTH - 0.9) / max(count, 3)
    figure = new_figure(
        _WIDTH, 3.2 * column * height / width + (0.3 * -(-classes // 8) if named else 0) + 0.2
    )
    grid = figure.subplots(3, max(count, 3), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    colours = ListedColormap(class_colours(classes))
    for index in range(count):
        show_image(grid[0, index], scenes.images[index])
        for row, mask in enumerate((scenes.labels[index], scenes.predictions[index]), start=1):
            known = np.ma.masked_less(mask, 0)
            # Between its first and last colour a map rounds: the range of class c is from c - ½ to c + ½.
            grid[row, index].imshow(known, colours, vmin=-0.5, vmax=classes - 0.5, interpolation="nearest")
    for axes, name in zip(grid[:, 0], ("image", "truth", "prediction"), strict=True):
        name_row(axes, name)
    if named:
        patches = [Patch(color=colours(c), label=literal(name)) for c, name in enumerate(class_names)]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(classes, 8))
    return figure


@styled
def draw_class_scores(
    intersection_over_union: NDArray[np.float64],
    class_accuracy: NDArray[np.float64],
    class_names: Sequence[str],
) -> Figure:
    """Draw two bars per class, the best class on top.

    Args:
        intersection_over_union: `(classes,)`, NaN for a class that is not there.
        class_accuracy: `(classes,)`, likewise.
        class_names: one name per class.
    """
    order = np.argsort(np.nan_to_num(intersection_over_union), kind="stable")[::-1]
    places = np.arange(len(order))
    figure = new_figure(6.4, 0.8 + 0.3 * len(order))
    axes = figure.add_subplot()
    scores = (("IoU", intersection_over_union, BLUE), ("found", class_accuracy, ORANGE))
    for shift, (label, values, colour) in zip((-0.2, 0.2), scores, strict=True):
        axes.barh(places + shift, np.nan_to_num(values[order]), 0.36, color=colour, label=label)
    axes.set_yticks(places, [literal(class_names[int(c)]) for c in order])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="lower right")
    return figure


def class_colours(classes: int) -> NDArray:
    """`(classes, 4)` colours that are told apart as well as so many can be."""
    palette = matplotlib.colormaps["tab20" if classes > 10 else "tab10"]
    if classes <= palette.N:
        return palette(np.arange(classes))
    return matplotlib.colormaps["turbo"](np.linspace(0, 1, classes))
