"""The scores that are logged, by what is classified."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex, MulticlassStatScores

from opteq.data.facts import Task
from opteq.data.scenes import IGNORED

# The first one chooses the best checkpoint and leads the summary.
SCORES: dict[Task, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "segmentation": ("mIoU", "mAcc", "aAcc"),
}


def make_scores(task: Task, classes: int) -> MetricCollection:
    """Metrics of logits (batch, classes, …) and labels (batch, …), by their names in the logs.

    - classification: `accuracy`, and with more than five classes `accuracy_top5`
    - segmentation: over all pixels with a class, `mIoU`, the mean over the classes of intersection over
      union, without those neither there nor predicted; `mAcc`, the mean over the classes that are there of
      the share of their pixels found; `aAcc`, the share of all pixels that are right.
    """
    if task == "segmentation":
        return MetricCollection(
            {
                "mIoU": MulticlassJaccardIndex(classes, ignore_index=IGNORED),
                "mAcc": MeanClassAccuracy(classes, ignore_index=IGNORED),
                "aAcc": MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED),
            }
        )
    scores: dict[str, Metric | MetricCollection] = {"accuracy": MulticlassAccuracy(classes, average="micro")}
    if classes > 5:
        scores["accuracy_top5"] = MulticlassAccuracy(classes, top_k=5, average="micro")
    return MetricCollection(scores)


class MeanClassAccuracy(MulticlassStatScores):
    """Mean over the classes that are there of the share of their pixels that were found.

    torchmetrics' macro accuracy counts classes that are only predicted as 0, also where they cannot be found.

    Args:
        classes: Number of classes.
        options: The other options of `MulticlassStatScores`.
    """

    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__(classes, average=None, **options)

    def compute(self) -> Tensor:
        found, _, _, missed = self._final_state()
        there = found + missed > 0
        return (found[there] / (found + missed)[there]).mean()
