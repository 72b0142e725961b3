"""Each figure is drawn (warnings are errors) and its artists are compared with the data."""

import dataclasses
import math

import matplotlib
import numpy as np
import pytest
import torch

import opteq.evaluation.record as records
from opteq.errors import ConfigError
from opteq.evaluation.branchstudy import BranchRecord
from opteq.evaluation.equilibriumreport import worth
from opteq.evaluation.equilibriumstudy import STEPS, EquilibriumRecord, LayerRecord
from opteq.evaluation.page import _PHONE
from opteq.evaluation.paired import Difference
from opteq.evaluation.scores import reliability
from opteq.evaluation.trace import Traces
from opteq.plots.calibration import draw_calibration
from opteq.plots.confusion import draw_confusion
from opteq.plots.convergence import draw_objective, draw_residual
from opteq.plots.equilibria import draw_equilibria
from opteq.plots.overview import draw_overview
from opteq.plots.patchweights import draw_attention
from opteq.plots.relations import draw_correlation, draw_perturbations, draw_relations
from opteq.plots.samples import draw_samples
from opteq.plots.style import literal, to_svg, wrapped
from opteq.plots.training import draw_curves
from opteq.plots.worth import draw_accuracy, draw_residuals, draw_spectra, draw_units
from opteq.theory.spectrum import Spectrum


def make_samples(count, channels=3):
    rng = np.random.default_rng(0)
    return records.Samples(
        images=rng.random((count, 5, 6, channels), dtype=np.float32),
        labels=np.arange(count) % 2,
        predictions=np.arange(count) // 2 % 2,
        confidences=rng.random(count, dtype=np.float32),
    )


def make_traces(count=3, size=(4, 5), energy=True, branches=0, symbol="z"):
    rng = np.random.default_rng(1)
    fall = 0.5 ** np.arange(12) * (1 + rng.random((count, 1)))
    return Traces(
        images=rng.random((count, 8, 8, 1), dtype=np.float32),
        symbol=np.array(symbol),
        residual=fall,
        tolerance=np.array(2e-3),
        energy=fall**2 - 7 if energy else np.zeros((count, 0)),
        distance=np.where(np.arange(count) == 1, np.nan, 0.0123),
        rms=rng.random((count, *size), dtype=np.float32),
        channels=rng.standard_normal((count, 2, *size)).astype(np.float32),
        channel_indices=np.array([5, 0]),
        attention=rng.random((count, branches, 2, 2), dtype=np.float32),
        minimiser=np.ones(count, np.bool_),
        local_minimiser=np.ones(count, np.bool_),
    )


def make_branches():
    rng = np.random.default_rng(2)
    return BranchRecord(
        heritage=rng.random(9) + 1,
        diversity=rng.random(9),
        diagonal_share=np.linspace(0.25, 0.5, 9),
        correlation=rng.random((4, 4)),
        sizes=np.array([0.0, 0.1, 0.3]),
        accuracy=np.stack([np.full((5, 3), 0.4), *rng.random((2, 5, 3))]),
    )


def make_record(traces):
    return records.TestRecord(
        class_names=("a", "b"),
        labels=np.array([0, 1]),
        predictions=np.array([0, 0]),
        confidences=np.array([0.9, 0.6], np.float32),
        ranks=np.array([0, 1]),
        solves=2,
        unconverged=0,
        solver_steps_mean=6.0,
        residual_max=1e-5,
        right=make_samples(1),
        mistakes=make_samples(1),
        traces=traces,
        branches=BranchRecord.nothing(),
    )


def pictures(figure):
    return [image.get_array() for axes in figure.axes for image in axes.get_images()]


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_confusion_shows_counts_and_shares_of_the_true_class():
    confusion = np.array([[8, 2, 0], [0, 5, 0], [0, 0, 0]])
    figure = draw_confusion(confusion, ["<b>", "$a_$ $b^", "c" * 90])
    to_svg(figure)
    counts = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert counts == {(0, 0): "8", (1, 0): "2", (1, 1): "5"}
    (share,) = figure.axes[0].get_images()
    np.testing.assert_allclose(share.get_array(), [[0.8, 0.2, 0], [0, 1, 0], [0, 0, 0]])
    # Nothing is drawn where there is nothing: the page may be light or dark.
    assert share.to_rgba(0.0)[3] == 0
    assert share.to_rgba(1.0)[3] == 1


@pytest.mark.parametrize("classes", [1, 2, 30, 120])
def test_confusion_of_any_number_of_classes(classes):
    figure = draw_confusion(np.eye(classes, dtype=int) * 3, [f"class {i}" for i in range(classes)])
    to_svg(figure)
    assert len(figure.axes[0].texts) == (classes if classes <= 15 else 0)


def test_calibration_bars_are_the_accuracies():
    bins = reliability(np.array([0.55, 0.95, 0.97, 1.0]), np.array([True, True, False, True]), 10)
    figure = draw_calibration(bins)
    to_svg(figure)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_array_equal(heights, bins.accuracy)
    assert not figure.axes[0].lines[1].get_clip_on()
    assert [bar.get_height() for bar in figure.axes[1].patches] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 3]


def test_a_few_counts_have_more_than_one_tick():
    for count in (5, 12):
        figure = draw_calibration(reliability(np.full(count, 0.55), np.arange(count) % 2 == 0, 10))
        to_svg(figure)
        below = figure.axes[1]
        low, high = below.get_ylim()
        shown = [tick for tick in below.get_yticks() if low <= tick <= high]
        assert len(shown) > 2
        assert shown == [round(tick) for tick in shown]


def decades_of(axes):
    """The first and the last exponent on a log scale, which has to go a little beyond both."""
    assert axes.get_yscale() == "log"
    low, high = np.log10(axes.get_ylim())
    first, last = math.ceil(low), math.floor(high)
    assert (first - low, high - last) == pytest.approx([0.05 * (last - first)] * 2)
    return first, last


def test_the_residual_is_drawn_on_decades_with_its_median_and_the_tolerance():
    traces = make_traces()
    (axes,) = (figure := draw_residual(traces.residual, 2e-6)).axes
    to_svg(figure)
    *lines, median, tolerance = axes.lines
    np.testing.assert_allclose([line.get_ydata() for line in lines], traces.residual)
    np.testing.assert_allclose(median.get_ydata(), np.median(traces.residual, axis=0))
    assert set(tolerance.get_ydata()) == {2e-6}
    assert decades_of(axes) == (-6, 1)
    # Nothing is cut at the frame.
    (without,) = draw_residual(traces.residual, np.nan).axes
    assert len(without.lines) == len(lines) + 1


def test_the_objective_is_drawn_above_its_lowest():
    traces = make_traces()
    (axes,) = (figure := draw_objective(traces.energy)).axes
    to_svg(figure)
    above = np.array([line.get_ydata() for line in axes.lines[:3]])
    np.testing.assert_allclose(above[:, :-1], (traces.energy - traces.energy[:, -1:])[:, :-1])
    assert np.isnan(above[:, -1]).all()
    lowest, highest = decades_of(axes)
    assert 10.0**lowest <= np.nanmin(above) <= np.nanmax(above) <= 10.0**highest


def test_convergence_leaves_out_what_is_only_rounding():
    residual = np.array([[1.0, 1e-8, 1e-16, 2e-16]])
    energy = np.array([[-900.0, -1000.0, -1000.0 - 1e-9, -1000.0 - 1e-9 + 2e-13]])
    left, right = draw_residual(residual, np.nan).axes[0], draw_objective(energy).axes[0]
    np.testing.assert_array_equal(left.lines[0].get_ydata(), [1.0, 1e-8, np.nan, np.nan])
    assert np.isfinite(right.lines[0].get_ydata()).tolist() == [True, True, False, False]


def test_the_median_goes_on_until_half_of_the_lines_have_ended():
    residual = np.array(
        [[1e-1, 1e-16, 1e-16, 1e-16], [1e-2, 1e-3, 1e-16, np.inf], [1e-3, 1e-4, 1e-5, np.inf]]
    )
    *_, median = draw_residual(residual, np.nan).axes[0].lines
    np.testing.assert_array_equal(median.get_ydata(), [1e-2, 1e-4, np.nan, np.nan])
    # Of an even number, between the two in the middle as long as there are both.
    *_, median = draw_residual(residual[:2], np.nan).axes[0].lines
    np.testing.assert_allclose(median.get_ydata(), [5.5e-2, np.nan, np.nan, np.nan])


def test_training_draws_a_curve_per_stage():
    epochs = np.array([1.0, 2.0])
    loss = {"train": (epochs, np.array([2.0, 1.0])), "val": (epochs, np.array([3.0, 0.0]))}
    (axes,) = (figure := draw_curves("the_loss", loss)).axes
    to_svg(figure)
    assert titles(figure) == ["the loss"]
    assert titles(draw_curves("accuracy_top5", loss)) == ["top-5 accuracy"]
    np.testing.assert_array_equal([line.get_ydata() for line in axes.lines], [[2, 1], [3, 0]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training", "validation"]
    assert not any(line.get_clip_on() for line in axes.lines)
    (accuracy,) = draw_curves("accuracy", {"val": (epochs[:1], np.array([0.5]))}).axes
    assert "%" in accuracy.yaxis.get_major_formatter()(0.5)
    (residual,) = draw_curves("residual_max", {"val": (epochs, np.array([2e-3, 3e-5]))}).axes
    assert decades_of(residual) == (-5, -2)


@pytest.mark.parametrize("count", [1, 8, 11])
def test_samples_say_what_was_right_and_what_was_not(count):
    samples = make_samples(count, channels=1 if count == 1 else 3)
    figure = draw_samples(samples, ["a$b$", "<b>"])
    to_svg(figure)
    for image, drawn, title in zip(samples.images, pictures(figure), titles(figure), strict=True):
        np.testing.assert_array_equal(np.squeeze(image), np.squeeze(drawn))
        assert title.startswith("✓" if "true:" not in title else "✗")
    wrong = (samples.labels != samples.predictions).sum()
    assert sum("true:" in title for title in titles(figure)) == wrong


@pytest.mark.parametrize("size", [(4, 5), (1, 20)])
def test_equilibria_stand_below_their_images(size):
    traces = make_traces(size=size)
    figure = draw_equilibria(traces)
    to_svg(figure)
    rows = [traces.images, traces.rms, traces.channels[:, 0], traces.channels[:, 1]]
    expected = [picture for row in rows for picture in row]
    for drawn, picture in zip(pictures(figure), expected, strict=True):
        np.testing.assert_array_equal(np.squeeze(drawn), np.squeeze(picture))
    part = draw_equilibria(traces, [1])
    for drawn, whole in zip(part.axes, figure.axes[1::3], strict=True):
        np.testing.assert_array_equal(drawn.images[0].get_array(), whole.images[0].get_array())
        assert drawn.images[0].get_clim() == whole.images[0].get_clim()
    # The bounds that there are stand above the equilibria.
    assert [axes.get_title() for axes in figure.axes[3:6]] == ["± 1.2e-02", "", "± 1.2e-02"]


@pytest.mark.parametrize("branches", [1, 3])
def test_attention_stands_below_its_images_on_one_scale(branches):
    traces = make_traces(branches=branches)
    figure = draw_attention(traces)
    to_svg(figure)
    rows = [traces.images, *traces.attention.swapaxes(0, 1)]
    drawn = [image for axes in figure.axes for image in axes.get_images()]
    for image, picture in zip(drawn, [picture for row in rows for picture in row], strict=True):
        np.testing.assert_array_equal(np.squeeze(image.get_array()), np.squeeze(picture))
    limits = {image.get_clim() for image in drawn[len(traces.images) :]}
    assert limits == {(float(traces.attention.min()), float(traces.attention.max()))}


@pytest.mark.spec("R5.7")
def test_relations_show_both_averages_and_their_means():
    record = make_branches()
    (axes,) = (figure := draw_relations(record)).axes
    to_svg(figure)
    heritage, its_mean, diversity, other_mean = (line.get_ydata() for line in axes.lines)
    np.testing.assert_array_equal(heritage, record.heritage)
    np.testing.assert_array_equal(diversity, record.diversity)
    assert set(its_mean) == {record.heritage.mean()}
    assert set(other_mean) == {record.diversity.mean()}


@pytest.mark.spec("R5.7")
def test_correlation_shows_the_matrix_and_its_diagonal_share():
    record = make_branches()
    figure = draw_correlation(record)
    to_svg(figure)
    np.testing.assert_array_equal(pictures(figure)[0], record.correlation)
    assert titles(figure) == ["Diagonal share 25.0% (chance 25.0%)"]


@pytest.mark.spec("R5.7")
def test_perturbations_show_the_mean_and_the_range_of_the_trials():
    record = make_branches()
    (axes,) = (figure := draw_perturbations(record)).axes
    to_svg(figure)
    assert [line.get_label() for line in axes.lines] == ["reconstructed", "uniform", "binomial"]
    for line, band, accuracy in zip(axes.lines, axes.collections, record.accuracy, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), record.sizes)
        np.testing.assert_allclose(line.get_ydata(), accuracy.mean(0))
        heights = band.get_paths()[0].vertices[:, 1]
        np.testing.assert_allclose([heights.min(), heights.max()], [accuracy.min(), accuracy.max()])


def make_worth(alpha=(), operators=("W1", "W2", "W_h1", "W_h2"), layers=1):
    spectra = []
    for place, _ in enumerate(operators):
        values = torch.linspace(1, 0.1 * place, 4, dtype=torch.float64)
        kind = "estimate" if place == 1 else "exact"
        spectra.append(Spectrum(values, torch.tensor([0.1, 0.2, 0.3, 0.4]), kind, (4,), (8,)))
    fall = 0.5 ** np.arange(21.0)
    layer = LayerRecord(
        name="body$",
        map="Parallel",
        symbol="z",
        residual=np.stack([fall / 2, fall, 2 * fall]),
        operators=operators,
        spectra=tuple(spectra),
        active=(0.3, 0.6),
        alpha=alpha,
        input_norm=(1.0, 2.0),
        output_norm=(0.5, 0.7),
        scale=(0.1, 0.2),
        channels=((16, 3.2), (16, 5.1)),
        kernels=(),
    )
    accuracy = (0.2, 0.4, 0.5, 0.6, 0.65, 0.66)
    gains = tuple(Difference(0.67 - a, 0.1, 50) for a in accuracy)
    return EquilibriumRecord(50, STEPS, accuracy, 0.67, gains, (layer,) * layers, 1.5)


@pytest.mark.spec("R7.9")
def test_accuracy_is_drawn_against_the_iterations_and_the_equilibrium():
    record = make_worth()
    (axes,) = (figure := draw_accuracy(record)).axes
    to_svg(figure)
    level, curve = axes.lines
    assert set(level.get_ydata()) == {0.67}
    np.testing.assert_array_equal(curve.get_xdata(), STEPS)
    np.testing.assert_array_equal(curve.get_ydata(), record.accuracy)
    assert [text.get_text() for text in axes.get_xticklabels()] == list(map(str, STEPS))
    # One image of a thousand is no cliff.
    flat = dataclasses.replace(record, accuracy=(0.989,) * 6, full_accuracy=0.99)
    low, high = draw_accuracy(flat).axes[0].get_ylim()
    assert high - low > 0.01
    for all_alike in (0.0, 1.0):
        extreme = dataclasses.replace(record, accuracy=(all_alike,) * 6, full_accuracy=all_alike)
        low, high = draw_accuracy(extreme).axes[0].get_ylim()
        assert 0 <= low < high <= 1


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize(
    ("first", "gain", "sentence"),
    [
        (0.2, Difference(0.475, 0.1, 50), "iterating to the end gains 47.50 ± 10.00 percentage points (mean"),
        (0.7, Difference(-0.025, 0.02, 50), "iterating to the end loses 2.50 ± 2.00 percentage points (mean"),
        (
            0.7,
            Difference(-0.025, 0.04, 50),
            "iterating to the end loses 2.50 ± 4.00 percentage points, which 50 images do not decide (mean"
            " difference, 95 % interval of Student&#x27;s t).",
        ),
        (
            0.675,
            Difference(0.0, 0.1, 50),
            "as many, iterated to the end or not, a difference of 0.00 ± 10.00 percentage points (mean",
        ),
        # None of the images is answered otherwise.
        (0.675, Difference(0.0, 0.0, 50), "as many, iterated to the end or not."),
        (
            0.0,
            Difference(0.675, math.inf, 1),
            "iterating to the end gains 67.50 percentage points, which one image does not decide.",
        ),
    ],
)
def test_the_section_says_what_iterating_does_to_the_accuracy(first, gain, sentence):
    record = dataclasses.replace(make_worth(), accuracy=(first,) * 6, full_accuracy=0.675, gains=(gain,) * 6)
    assert f"with the equilibrium 67.50%: {sentence}" in worth(record)


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize("layers", [1, 2])
def test_residuals_have_a_median_and_a_range_for_every_layer(layers):
    record = make_worth(layers=layers)
    (axes,) = (figure := draw_residuals(record.layers)).axes
    to_svg(figure)
    assert len(axes.lines) == len(axes.collections) == layers
    for line, band, layer in zip(axes.lines, axes.collections, record.layers, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), layer.residual[1])
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.max() == layer.residual[2].max()
        assert heights.min() == layer.residual[0].min()
    assert (axes.get_legend() is not None) == (layers > 1)


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize("count", [0, 1, 6, 12, 14])
def test_singular_values_are_steps_as_long_as_their_shares(count):
    operators = tuple(f"W{i}" for i in range(1, count + 1)) or ("W", "W_h")
    (layer,) = make_worth(operators=operators).layers
    (axes,) = (figure := draw_spectra(layer)).axes
    to_svg(figure)
    assert len(axes.lines) == len(operators)
    for line, spectrum in zip(axes.lines, layer.spectra, strict=True):
        np.testing.assert_allclose(line.get_xdata(), [0, 0.1, 0.3, 0.6, 1], rtol=1e-6)
        np.testing.assert_array_equal(line.get_ydata()[:-1], spectrum.values)
    styles = [line.get_linestyle() for line in axes.lines]
    assert styles == (["-", ":"] if not count else ["-" if i != 1 else "--" for i in range(count)])
    assert (axes.get_legend() is not None) == (count <= 12)


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize("alpha", [(), (0.5, 0.9)])
def test_units_have_a_bar_each(alpha):
    (layer,) = make_worth(alpha).layers
    figure = draw_units(layer)
    to_svg(figure)
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[0.3, 0.6], *([[0.5, 0.9]] if alpha else [])]


@pytest.mark.parametrize("energy", [True, False])
def test_overview_shows_images_equilibria_and_curves(energy):
    figure = draw_overview(make_traces(energy=energy))
    to_svg(figure)
    assert len(pictures(figure)) == 6
    assert titles(figure) == (["Residual", "Hidden objective"] if energy else ["Residual"])


@pytest.mark.parametrize("draw", [draw_equilibria, draw_overview])
def test_what_is_read_of_the_state_has_its_own_symbol(draw):
    for symbol, other in ("zy", "yz"):
        figure = draw(make_traces(symbol=symbol))
        words = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
        assert f"{symbol}*" in words
        assert f"{other}*" not in words


def test_overview_without_equilibria_is_refused():
    traces = make_traces()
    nothing = {f.name: np.atleast_1d(getattr(traces, f.name))[:0] for f in dataclasses.fields(traces)}
    with pytest.raises(ConfigError, match="no equilibrium layer"):
        draw_overview(Traces(**nothing))


def test_drawing_leaves_the_settings_of_the_caller_alone_and_is_repeatable():
    before = dict(matplotlib.rcParams)
    traces = make_traces()
    first, second = (to_svg(draw_residual(traces.residual, 1e-3)) for _ in range(2))
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_labels_are_short_single_lines_without_formulas():
    assert literal("a\n b\tc") == "a b c"
    assert literal("$x$") == r"\$x\$"
    assert literal("x" * 50, longest=10) == "x" * 9 + "…"


def test_long_names_take_a_second_line_before_they_are_shortened():
    assert wrapped("american black bear", 16) == "american black\nbear"
    assert wrapped("$a$", 16) == r"\$a\$"
    lines = wrapped("a very long name of a class that does not end", 16).split("\n")
    assert len(lines) == 2
    assert max(map(len, lines)) <= 16
    assert lines[1].endswith("…")


def test_the_names_of_a_confusion_matrix_can_be_read():
    names = ["shortest", "the name of a class with 31 chars", "b"]
    figure = draw_confusion(np.eye(3, dtype=int), names)
    to_svg(figure)
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert shown == ["shortest", "the name of a class with 31 cha…", "b"]
    bare = draw_confusion(np.eye(3, dtype=int), ["a", "b", "c"])
    assert figure.get_figwidth() > bare.get_figwidth() + 2
    # Pixels that can still be read where they are brought to the width of a phone.
    assert 96 * bare.get_figwidth() < _PHONE
