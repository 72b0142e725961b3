"""The suite `equilibrium`."""

from __future__ import annotations

from dataclasses import replace

from opteq.evaluation.equilibriumreport import as_json, figures, tables
from opteq.evaluation.equilibriumstudy import study_equilibrium
from opteq.evaluation.passes import share_of
from opteq.evaluation.suites.case import Case, Outcome


def equilibrium(case: Case) -> Outcome:
    """What equilibria are worth."""
    loader = case.data.test_dataloader()
    share = share_of(loader, case.options.images)
    record = study_equilibrium(case.network, case.parts.follow(loader), share=share)
    first, *others = tables(record)
    first = replace(first, title=first.title + case.left_out(loader))
    return Outcome(as_json(record), [first, *others], {end: figure for end, figure, _ in figures(record)})
