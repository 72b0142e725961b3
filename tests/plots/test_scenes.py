import matplotlib.colors
import numpy as np
import pytest

from opteq.evaluation.scenerecord import Scenes
from opteq.plots.masks import draw_class_scores, draw_scenes
from opteq.plots.style import to_svg


def make_scenes(count, classes):
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, classes, (2, count, 4, 6))
    labels[:, 0] = -100
    return Scenes(rng.random((count, 4, 6, 3), dtype=np.float32), labels, predictions)


@pytest.mark.spec("R7.7")
@pytest.mark.parametrize(("count", "classes"), [(1, 2), (4, 11), (6, 19), (2, 60)])
def test_masks_have_the_colours_of_the_legend(count, classes):
    scenes = make_scenes(count, classes)
    figure = draw_scenes(scenes, [f"$c_{i}" for i in range(classes)])
    to_svg(figure)
    shown = [axes.get_images()[0] for axes in figure.axes if axes.get_images()]
    assert len(shown) == 3 * count
    np.testing.assert_allclose(shown[0].get_array(), scenes.images[0])
    truth, answer = shown[count : 2 * count], shown[2 * count :]
    for index, (true, predicted) in enumerate(zip(truth, answer, strict=True)):
        # Pixels without a class are left open.
        assert true.get_array().mask[0].all()
        assert not true.get_array().mask[1:].any()
        np.testing.assert_array_equal(predicted.get_array(), scenes.predictions[index])
    colours = answer[0].to_rgba(np.arange(classes), bytes=False)
    assert len({tuple(colour) for colour in colours}) == classes
    if classes <= 40:
        (legend,) = figure.legends
        patches = [matplotlib.colors.to_rgba(patch.get_facecolor()) for patch in legend.get_patches()]
        np.testing.assert_allclose(patches, colours)
    else:
        assert not figure.legends


def test_class_scores_are_sorted_bars():
    union, found = np.array([0.2, np.nan, 0.7]), np.array([0.5, np.nan, 0.8])
    figure = draw_class_scores(union, found, ["a", "b", "c"])
    to_svg(figure)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "a", "b"]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    np.testing.assert_allclose(widths, [[0.7, 0.2, 0], [0.8, 0.5, 0]])
