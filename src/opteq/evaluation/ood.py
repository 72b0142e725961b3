"""How a classifier takes images of classes that it does not know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from opteq.evaluation.scores import detection, known_divergence, reliability, unknown_divergence


@dataclass(frozen=True, slots=True)
class OodScores:
    """Scores of a classifier on known and on unknown classes (Li et al. 2022b, §4.3).

    Attributes:
        temperature: by which the logits were divided.
        accuracy: on images of known classes.
        known_kl: mean `KL(one-hot ‖ prediction)` on them.
        ece: expected calibration error on them.
        unknown_kl: mean `KL(prediction ‖ uniform)` on images of unknown classes.
        auroc: the chance that a known image gets more confidence than an unknown one.
        known_confidence: `(n,)` confidences on known classes.
        unknown_confidence: `(m,)` confidences on unknown ones.
    """

    temperature: float
    accuracy: float
    known_kl: float
    ece: float
    unknown_kl: float
    auroc: float
    known_confidence: NDArray[np.float64]
    unknown_confidence: NDArray[np.float64]


def ood_scores(known: NDArray, labels: NDArray, unknown: NDArray, temperature: float = 1.0) -> OodScores:
    """The scores for logits divided by a temperature.

    Args:
        known: `(n, classes)` logits of images of known classes.
        labels: `(n,)` their classes.
        unknown: `(m, classes)` logits of images of unknown classes.
        temperature: see `fit_temperature`.
    """
    of_known, of_unknown = (log_softmax(logits / temperature, axis=1) for logits in (known, unknown))
    confidence, unknown_confidence = (np.exp(logs.max(1)) for logs in (of_known, of_unknown))
    right = known.argmax(1) == labels
    return OodScores(
        temperature=temperature,
        accuracy=float(right.mean()),
        known_kl=known_divergence(of_known, labels),
        ece=reliability(confidence, right).error,
        unknown_kl=unknown_divergence(of_unknown),
        auroc=detection(confidence, unknown_confidence),
        known_confidence=confidence,
        unknown_confidence=unknown_confidence,
    )


def fit_temperature(logits: NDArray, labels: NDArray) -> float:
    """The temperature from 1/20 to 20 whose predictions have the least cross entropy (Guo et al. 2017, §4.2).

    Args:
        logits: `(n, classes)` logits of images that neither trained nor test the network.
        labels: `(n,)` their classes.
    """

    def cross_entropy(log_temperature: float) -> float:
        return known_divergence(log_softmax(logits / np.exp(log_temperature), axis=1), labels)

    widest = np.log(20)
    fitted = minimize_scalar(
        cross_entropy, bounds=(-widest, widest), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(fitted.x))
