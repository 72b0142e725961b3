"""Scores of a classifier, as plain functions of NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from opteq.evaluation.paired import CONFIDENCE


def confusion_matrix(labels: NDArray, predictions: NDArray, classes: int) -> NDArray[np.int64]:
    """`(classes, classes)` counts: row = true class, column = predicted class."""
    pairs = np.asarray(labels) * classes + np.asarray(predictions)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def accuracy_interval(right: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy of which `right` of `samples` are known (Wilson 1927)."""
    interval = binomtest(right, samples).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True, slots=True)
class ClassScores:
    """How well each class is told from the others; NaN where there is nothing to tell.

    Attributes:
        counts: `(classes,)` samples of a class.
        recall: `(classes,)` share of them that was found.
        precision: `(classes,)` share that is right of those taken for the class.
        f1: `(classes,)` harmonic mean of the two.
    """

    counts: NDArray[np.int64]
    recall: NDArray[np.float64]
    precision: NDArray[np.float64]
    f1: NDArray[np.float64]


def class_scores(confusion: NDArray[np.int64]) -> ClassScores:
    """The scores of each class.

    Args:
        confusion: `(classes, classes)` counts: row = true class, column = predicted class.
    """
    right, counts, taken = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    with np.errstate(invalid="ignore"):
        return ClassScores(counts, right / counts, right / taken, 2 * right / (counts + taken))


def known_divergence(log_probabilities: NDArray, labels: NDArray) -> float:
    """Mean `KL(one-hot ‖ prediction) = -ln p_label` over images of known classes (Li et al. 2022b, §4.3).

    Args:
        log_probabilities: `(samples, classes)` logarithms of the predicted probabilities.
        labels: `(samples,)` true classes.
    """
    return float(-log_probabilities[np.arange(len(labels)), labels].mean())


def unknown_divergence(log_probabilities: NDArray) -> float:
    """Mean `KL(prediction ‖ uniform) = ln K + Σ p ln p` over images of unseen classes, from 0 to `ln K`.

    (Li et al. 2022b, §4.3.) Zero is a model that has no idea, as it should have none.

    Args:
        log_probabilities: `(samples, K)` logarithms of the predicted probabilities.
    """
    probabilities = np.exp(log_probabilities)
    # p ln p tends to 0 where ln p is infinite.
    terms = np.where(probabilities > 0, probabilities * np.maximum(log_probabilities, -1e300), 0.0)
    return float(np.log(log_probabilities.shape[1]) + terms.sum(1).mean())


def detection(known: NDArray, unknown: NDArray) -> float:
    """AUROC: the chance that a known image gets more confidence than an unseen one, ties half.

    Args:
        known: `(n,)` confidences on images of known classes.
        unknown: `(m,)` confidences on images of unseen classes.
    """
    which = np.concatenate([np.ones(len(known)), np.zeros(len(unknown))])
    return float(roc_auc_score(which, np.concatenate([known, unknown])))


@dataclass(frozen=True, slots=True)
class Reliability:
    """How often a classifier is right, as a function of how sure it says it is.

    Attributes:
        edges: `(bins + 1,)` borders of the confidence bins; a bin holds its upper border.
        counts: `(bins,)` number of samples in each bin.
        confidence: `(bins,)` mean confidence in each bin, NaN where it is empty.
        accuracy: `(bins,)` share of right predictions in each bin, NaN where it is empty.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error (Guo et al. 2017, eq. 3).

        `Σ_b counts_b / samples · |accuracy_b - confidence_b|`
        """
        gap = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float(np.average(gap, weights=self.counts))


def reliability(confidences: NDArray, correct: NDArray, bins: int = 15) -> Reliability:
    """Bin predictions by confidence, in `bins` intervals of equal width (Guo et al. 2017).

    Args:
        confidences: `(samples,)` probability given to the predicted class, in [0, 1].
        correct: `(samples,)` whether the prediction is right.
        bins: number of intervals.
    """
    edges = np.linspace(0.0, 1.0, bins + 1)
    which = np.digitize(confidences, edges[1:-1], right=True)
    counts = np.bincount(which, minlength=bins)
    # An empty bin has no mean: NaN says so, and the division by zero is meant.
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(which, weights=confidences, minlength=bins) / counts
        accuracy = np.bincount(which, weights=correct, minlength=bins) / counts
    return Reliability(edges, counts, confidence, accuracy)
