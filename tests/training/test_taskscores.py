import numpy as np
import pytest
import torch

from opteq.data.scenes import IGNORED
from opteq.training.taskscores import SCORES, make_scores


def by_hand(labels, predictions, classes):
    """Scores from sets of pixels, class by class."""
    known = labels != IGNORED
    labels, predictions = labels[known], predictions[known]
    unions, hits, sizes = [], [], []
    for c in range(classes):
        truth, answer = labels == c, predictions == c
        unions.append((truth | answer).sum())
        hits.append((truth & answer).sum())
        sizes.append(truth.sum())
    there = [c for c in range(classes) if unions[c]]
    return {
        "mIoU": np.mean([hits[c] / unions[c] for c in there]),
        "mAcc": np.mean([hits[c] / sizes[c] for c in range(classes) if sizes[c]]),
        "aAcc": sum(hits) / len(labels),
    }


@pytest.mark.spec("R7.7")
@pytest.mark.parametrize("absent", [False, True])
def test_segmentation_scores_agree_with_counting(absent):
    rng = np.random.default_rng(0)
    batches = [
        (rng.standard_normal((3, 5, 6, 7)), rng.integers(0, 4 - 2 * absent, (3, 6, 7))) for _ in range(3)
    ]
    scores = make_scores("segmentation", 5)
    for logits, labels in batches:
        # Class 4 is in nobody's mind, and the second half of each image has no class.
        logits[:, 4] = -9.0
        labels[:, 3:] = IGNORED
        scores.update(torch.tensor(logits), torch.tensor(labels))
    labels = np.concatenate([y for _, y in batches])
    predictions = np.concatenate([x.argmax(1) for x, _ in batches])
    computed = {name: value.item() for name, value in scores.compute().items()}
    assert computed == pytest.approx(by_hand(labels, predictions, 5))
    assert set(computed) == set(SCORES["segmentation"])


@pytest.mark.spec("R7.7")
def test_a_class_that_is_only_predicted_is_not_one_that_was_missed():
    labels, predictions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 2, 1, 1, 1])
    scores = make_scores("segmentation", 3)
    scores.update(predictions[None], labels[None])
    computed = {name: value.item() for name, value in scores.compute().items()}
    # Two of three pixels of class 0, all of class 1, and there is none of class 2.
    assert computed == pytest.approx({"mAcc": (2 / 3 + 1) / 2, "mIoU": (2 / 3 + 1 + 0) / 3, "aAcc": 5 / 6})


def test_top5_needs_more_than_five_classes():
    assert set(make_scores("classification", 5).keys()) == {"accuracy"}
    assert set(make_scores("classification", 6).keys()) == {"accuracy", "accuracy_top5"}
