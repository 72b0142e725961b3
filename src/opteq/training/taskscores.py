"""The scores that are logged, by what is classified."""

from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

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
      union; `mAcc`, the mean over the classes of the share of their pixels found; `aAcc`, the share of
      all pixels that are right. Classes neither there nor predicted are left out of the means.
    """
    if task == "segmentation":
        return MetricCollection(
            {
                "mIoU": MulticlassJaccardIndex(classes, ignore_index=IGNORED),
                "mAcc": MulticlassAccuracy(classes, average="macro", ignore_index=IGNORED),
                "aAcc": MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED),
            }
        )
    scores: dict[str, Metric | MetricCollection] = {"accuracy": MulticlassAccuracy(classes, average="micro")}
    if classes > 5:
        scores["accuracy_top5"] = MulticlassAccuracy(classes, top_k=5, average="micro")
    return MetricCollection(scores)
