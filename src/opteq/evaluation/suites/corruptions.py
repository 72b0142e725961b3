"""The suite `corruptions`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opteq.errors import ConfigError
from opteq.evaluation.corrupting.corrupt import SEVERITIES
from opteq.evaluation.corruptions import corrupted_accuracy
from opteq.evaluation.suites.case import Case, Outcome, percent
from opteq.evaluation.table import Table
from opteq.plots.robustness import draw_corruptions


def corruptions(case: Case) -> Outcome:
    """Accuracy on corrupted images."""
    options, loader = case.options, case.data.test_dataloader()
    if options.corrupted is not None and (case.data.in_channels, case.data.image_size) != (3, 32):
        raise ConfigError(
            f"The published arrays are colour images of 32×32 pixels, but those of {case.data.title} are not:"
            " leave --corrupted out, and its own are corrupted."
        )

    def accuracy_of_clean(name: str) -> float:
        logits, labels = case.logits(loader)
        return float((logits.argmax(1) == labels).mean())

    clean = case.parts.measure(["clean"], accuracy_of_clean)["clean"]
    source = loader if options.corrupted is None else Path(options.corrupted)
    accuracy = corrupted_accuracy(case.network, source, case.data.normalization, options.images, case.parts)
    means = {name: float(np.mean(values)) for name, values in accuracy.items()}
    mean = float(np.mean(list(means.values())))
    by_severity = np.mean(list(accuracy.values()), axis=0)
    rows = [[name, *percent(values), f"{means[name]:.2%}"] for name, values in accuracy.items()]
    rows.append(["mean", *percent(by_severity), f"{mean:.2%}"])
    table = Table(
        f"Accuracy on {case.images(loader)} when corrupted; {clean:.2%} as they are",
        ["severity", *map(str, range(1, SEVERITIES + 1)), "mean"],
        rows,
    )
    scores = {"clean": clean, "mean": mean, "means": means, "accuracy": accuracy}
    return Outcome(scores, [table], {"": draw_corruptions(accuracy, clean)})
