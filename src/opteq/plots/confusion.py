"""The confusion matrix of a classifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from opteq.plots.style import BLUE, TEXT, literal, new_figure, styled

# Beyond these numbers of classes, counts and then names would be too small to read.
_MOST_COUNTS = 15
_MOST_NAMES = 40
# Letters of a name, and inches that one takes beside the matrix.
_LONGEST_NAME = 32
_LETTER = 0.07
# From the ground of the page, light or dark, to blue.
_SHARES = LinearSegmentedColormap.from_list("shares", [to_rgba(BLUE, 0), to_rgba(BLUE)])
# The share from which white is easier to read on it than dark letters are on a light page.
_DARK = 0.7


@styled
def draw_confusion(confusion: NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """Draw counts, coloured by the share of each true class.

    Args:
        confusion: `(classes, classes)`, row = true class, column = predicted class.
        class_names: one name per class.
    """
    classes = len(class_names)
    totals = confusion.sum(axis=1, keepdims=True)
    share = confusion / np.maximum(totals, 1)
    side = float(np.clip(0.32 * classes + 1.6, 3.0, 7.0))
    names = [literal(name, _LONGEST_NAME) for name in class_names]
    room = _LETTER * max(map(len, names)) if classes <= _MOST_NAMES else 0.0
    figure = new_figure(side + room + 0.9, side + room)
    axes = figure.add_subplot()
    # The square root brings out the rare mistakes, which a linear scale would not show.
    picture = axes.imshow(share, cmap=_SHARES, norm=PowerNorm(0.5, vmin=0, vmax=1))
    axes.grid(visible=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")

    if classes <= _MOST_NAMES:
        size = 8 if classes <= 20 else 5.5
        turned = max(map(len, names)) > 3
        axes.set_xticks(range(classes), names, rotation=90 if turned else 0, fontsize=size)
        axes.set_yticks(range(classes), names, fontsize=size)
    if classes <= _MOST_COUNTS:
        for row, column in zip(*np.nonzero(confusion), strict=True):
            axes.text(
                column,
                row,
                str(confusion[row, column]),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if share[row, column] > _DARK else TEXT,
            )
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, ticks=[0, 0.02, 0.1, 0.25, 0.5, 1])
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bar.set_label("share of the true class")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure
