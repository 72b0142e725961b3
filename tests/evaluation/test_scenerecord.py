import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.evaluation.scenerecord import SHOWN_SCENES, SegmentationRecord, evaluate_scenes
from opteq.models.bodies import Deep
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import PixelHead
from opteq.models.stems import ConvStem

NORMALIZATION = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
NAMES = ("a", "b", "c", "never")


class Brightest(nn.Module):
    """Takes the number of the largest of the three colours for the class."""

    def forward(self, images):
        return torch.cat([images, torch.full_like(images[:, :1], -99.0)], 1)


@pytest.fixture
def data():
    torch.manual_seed(0)
    images = torch.randn(10, 3, 8, 12)
    labels = images.argmax(1)
    labels[:, :2] = (labels[:, :2] + 1) % 3
    labels[:, 6:, 6:] = -100
    return images, labels


def batches(images, labels):
    return list(zip(images.split(4), labels.split(4), strict=True))


@pytest.mark.spec("R7.7")
def test_the_scores_of_a_network_that_is_wrong_in_a_known_place(data):
    images, labels = data
    record = evaluate_scenes(Brightest(), batches(*data), NAMES, NORMALIZATION, "cpu")
    truth, answer = labels.numpy(), images.argmax(1).numpy()
    known = truth >= 0
    assert record.confusion.sum() == known.sum() == 10 * (8 * 12 - 2 * 6)
    # Two of the eight rows are wrong, of which none is without a class.
    assert record.pixel_accuracy == pytest.approx(1 - 10 * 2 * 12 / known.sum())
    for c in range(3):
        right = ((truth == c) & (answer == c)).sum()
        union = known & ((truth == c) | (answer == c))
        assert record.intersection_over_union[c] == pytest.approx(right / union.sum())
        assert record.class_accuracy[c] == pytest.approx(right / (truth == c).sum())
    assert np.isnan(record.intersection_over_union[3])
    assert np.isnan(record.class_accuracy[3])


def test_a_class_that_only_predictions_have_cannot_be_found():
    confusion = np.array([[3, 1], [0, 0]])
    record = dataclasses.replace(evaluated(), class_names=("a", "b"), confusion=confusion)
    np.testing.assert_allclose(record.intersection_over_union, [0.75, 0])
    np.testing.assert_allclose(record.class_accuracy, [0.75, np.nan])


def evaluated():
    images = torch.randn(2, 3, 4, 4)
    return evaluate_scenes(Brightest(), [(images, images.argmax(1))], NAMES, NORMALIZATION, "cpu")


def test_scenes_show_their_own_unnormalised_image(data):
    images, labels = data
    mean, deviation = (torch.tensor(v)[:, None, None] for v in NORMALIZATION)
    record = evaluate_scenes(Brightest(), batches(*data), NAMES, NORMALIZATION, "cpu")
    assert len(record.scenes.images) == SHOWN_SCENES
    originals = (images * deviation + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    for image, label, prediction in zip(*dataclasses.astuple(record.scenes), strict=True):
        distances = np.abs(originals - image).max((1, 2, 3))
        index = distances.argmin()
        assert distances[index] < 1e-6
        np.testing.assert_array_equal(label, labels[index])
        np.testing.assert_array_equal(prediction, images[index].argmax(0))


@pytest.mark.spec("R7.7")
def test_solves_are_counted_and_a_saved_record_comes_back(data, tmp_path):
    torch.manual_seed(0)
    network = ImageClassifier(ConvStem(3, 8, downsamplings=1), Deep(8, (4, 4, 4)), PixelHead(8, 4))
    record = evaluate_scenes(network, batches(*data), NAMES, NORMALIZATION, "cpu")
    assert network.training
    assert (record.solves, record.unconverged) == (10, 0)
    assert record.solver_steps_mean >= 1
    assert 0 < record.residual_max <= 1e-3
    assert record.traces.rms.shape == (3, 4, 6)
    assert record.traces.energy.size == 0
    record.save(tmp_path / "record.npz")
    loaded = SegmentationRecord.load(tmp_path / "record.npz")
    for field in ("confusion", "class_names", "solves", "residual_max"):
        np.testing.assert_array_equal(getattr(loaded, field), getattr(record, field))
    for part in ("scenes", "traces"):
        pairs = zip(*(dataclasses.astuple(getattr(r, part)) for r in (loaded, record)), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_bad_answers_and_empty_sets_are_refused(data):
    images, labels = data
    with pytest.raises(ShapeError, match=r"shape \(10, 2, 8, 12\), got \(10, 4, 8, 12\)"):
        evaluate_scenes(Brightest(), [data], "ab", NORMALIZATION, "cpu")
    images[3, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="1 of 10 images"):
        evaluate_scenes(Brightest(), [(images, labels)], NAMES, NORMALIZATION, "cpu")
    with pytest.raises(ConfigError, match="test set is empty"):
        evaluate_scenes(Brightest(), [], NAMES, NORMALIZATION, "cpu")
