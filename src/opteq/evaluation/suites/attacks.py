"""The suite `attacks`."""

from __future__ import annotations

from opteq.evaluation.robustness import attack_accuracies
from opteq.evaluation.suites.case import Case, Outcome, percent
from opteq.evaluation.table import Table
from opteq.plots.robustness import draw_attacks

# The loss of one of its attacks is about the four largest logits.
_AUTOATTACK_CLASSES = 4


def attacks(case: Case) -> Outcome:
    """Accuracy under attacks."""
    options, loader = case.options, case.data.test_dataloader()
    found = attack_accuracies(
        case.network,
        case.chosen(loader),
        case.data.normalization,
        options.epsilons,
        options.restarts,
        options.autoattack and len(case.data.class_names) >= _AUTOATTACK_CLASSES,
        case.parts,
    )
    rows = [
        [
            f"{255 * e:.3g}/255",
            *percent(values),
            *percent([found.autoattack[e]] if found.autoattack else []),
        ]
        for e, values in found.pgd.items()
    ]
    header = ["ε", *(f"PGD-{k}" for k in found.steps), *(["AutoAttack"] if found.autoattack else [])]
    table = Table(f"Accuracy under attack on {case.images(loader)}; {found.clean:.2%} without", header, rows)
    # The keys of JSON objects are texts.
    scores = {
        "clean": found.clean,
        "steps": found.steps,
        "epsilons": list(found.pgd),
        "pgd": list(found.pgd.values()),
        "autoattack": list(found.autoattack.values()),
    }
    return Outcome(scores, [table], {"": draw_attacks(found)})
