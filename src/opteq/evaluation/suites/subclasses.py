"""The suite `subclasses`."""

from __future__ import annotations

from dataclasses import asdict

from opteq.data.base import ImageDataModule
from opteq.errors import ConfigError
from opteq.evaluation.subclasses import subclass_scores
from opteq.evaluation.suites.case import Case, Outcome
from opteq.evaluation.table import Table
from opteq.plots.unknown import draw_subclasses


def subclasses(case: Case) -> Outcome:
    """Accuracy on sub-classes that were trained on, and on others."""
    data = case.data.data
    if not isinstance(data, ImageDataModule):
        raise ConfigError(
            f"The suite subclasses takes data of opteq with super-classes, not {case.data.title}."
        )
    loader = data.subclass_dataloader() if data.superclasses else []
    found = subclass_scores(case.network, data, case.parts.follow(case.chosen(loader)))
    rows = [
        [name, "yes" if known else "no", f"{count:,}", f"{accuracy:.2%}"]
        for name, known, count, accuracy in zip(
            found.names, found.known, found.counts, found.accuracy, strict=True
        )
    ]
    for name, chosen, mean in (
        ("all known", found.known, found.known_accuracy),
        ("all unknown", ~found.known, found.unknown_accuracy),
    ):
        rows.append([name, "", f"{found.counts[chosen].sum():,}", f"{mean:.2%}"])
    title = f"Super-class found on {case.images(loader)}, by sub-class"
    table = Table(title, ["sub-class", "trained on", "images", "accuracy"], rows)
    means = {"known_accuracy": found.known_accuracy, "unknown_accuracy": found.unknown_accuracy}
    return Outcome(means | asdict(found), [table], {"": draw_subclasses(found)})
