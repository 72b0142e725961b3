import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix as sklearn_confusion
from torchmetrics.functional.classification import multiclass_calibration_error

from opteq.evaluation.scores import accuracy_interval, class_scores, confusion_matrix, reliability


def test_scores_of_each_class_by_hand():
    #                            taken for a, b, c, d
    confusion = np.array([[3, 1, 0, 0], [2, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    scores = class_scores(confusion)
    assert scores.counts.tolist() == [4, 4, 1, 0]
    np.testing.assert_allclose(scores.recall, [3 / 4, 2 / 4, 0, np.nan])
    np.testing.assert_allclose(scores.precision, [3 / 5, 2 / 4, np.nan, np.nan])
    harmonic = [2 / (4 / 3 + 5 / 3), 2 / (2 + 2), 0, np.nan]
    np.testing.assert_allclose(scores.f1, harmonic)


def test_confusion_matrix_is_that_of_sklearn():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 7, (2, 500))
    expected = sklearn_confusion(labels, predictions, labels=range(9))
    np.testing.assert_array_equal(confusion_matrix(labels, predictions, 9), expected)


def test_confusion_matrix_of_a_single_class():
    zeros = np.zeros(4, int)
    np.testing.assert_array_equal(confusion_matrix(zeros, zeros, 1), [[4]])


def test_calibration_error_is_that_of_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    probabilities = (3 * torch.randn(800, 5, generator=generator)).softmax(1)
    labels = torch.randint(0, 5, (800,), generator=generator)
    expected = multiclass_calibration_error(probabilities, labels, num_classes=5, n_bins=15)
    confidences, predictions = probabilities.double().max(1)
    computed = reliability(confidences.numpy(), (predictions == labels).numpy())
    assert computed.error == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(("right", "samples"), [(0, 12), (6, 12), (12, 12), (9000, 10000)])
def test_the_interval_of_an_accuracy_holds_what_the_answers_do_not_contradict(right, samples):
    low, high = accuracy_interval(right, samples)
    # Its ends are 1.96 of their own standard deviations from what was seen, unless they are 0 or 1.
    for end in {low, high} - {0.0, 1.0}:
        assert (right / samples - end) ** 2 == pytest.approx(
            1.959964**2 * end * (1 - end) / samples, rel=1e-5
        )
    assert low <= right / samples <= high


def test_reliability_bins_by_hand():
    bins = reliability(np.array([0.1, 0.5, 0.6, 0.9, 1.0]), np.array([0, 1, 0, 1, 1]), bins=2)
    np.testing.assert_array_equal(bins.counts, [2, 3])
    np.testing.assert_allclose(bins.confidence, [0.3, 2.5 / 3])
    np.testing.assert_allclose(bins.accuracy, [0.5, 2 / 3])
    assert bins.error == pytest.approx(2 / 5 * 0.2 + 3 / 5 * 0.5 / 3)


def test_an_empty_bin_has_no_mean_and_adds_no_error():
    bins = reliability(np.array([1.0, 1.0]), np.array([True, True]), bins=4)
    assert np.isnan(bins.accuracy[:3]).all()
    assert bins.error == 0.0
