"""Compiled functions as operators of PyTorch: their schemas, and what they say of tensors without memory."""

import pytest
import torch
from torch.library import opcheck

from opteq import native
from opteq.native import winograd
from opteq.native.mixture import History

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def wide(*shape):
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64)


def images(*shape):
    return drawn(*shape).contiguous(memory_format=torch.channels_last)


def history():
    """Of five steps, three of which are remembered."""
    kept = History.like(drawn(2, 9), 3)
    kept.changes.copy_(drawn(2, 3, 9))
    kept.candidates.copy_(drawn(2, 3, 9))
    return kept.changes, kept.candidates, kept.gram, kept.best, kept.before, kept.born


WEIGHT = drawn(20, 16, 3, 3)
ROWS = torch.tensor([True, True, True])
CALLS = {
    "winograd_transformed": (WEIGHT, False),
    "winograd_convolve": lambda: (drawn(2, 16, 9, 8), winograd.transformed(WEIGHT, False), 20),
    "winograd_weight_gradient": (drawn(2, 16, 9, 8), images(2, 20, 9, 8)),
    "packed": (drawn(20, 33),),
    "packed_multiply": lambda: (drawn(7, 20), torch.ops.opteq.packed(drawn(20, 33)), 33),
    "packed_gram": (drawn(20, 33),),
    "packed_each": (drawn(3, 4, 6), drawn(3, 4, 5), drawn(3, 5, 6), 0.5),
    "forces": (images(3, 8, 6, 4), 4, 2, drawn(16, 16), torch.ones(3), drawn(3, 12, 16), drawn(3, 12, 1)),
    "pooling_average": (images(3, 8, 6, 4), 2),
    "pooling_spread": (images(3, 8, 6, 4), images(3, 8, 3, 2), 2, True),
    "rows_observe": (drawn(3, 8), drawn(3, 8), drawn(3, 8), drawn(3, 8), wide(3, 2), False, True),
    "rows_hold": (drawn(3, 8), drawn(3, 8), ROWS),
    "rows_mix": (*history(), wide(2, 2), 5, True, 1e-6),
    "rows_descend": (*(drawn(3, 8) for _ in range(5)), wide(3), ROWS, torch.zeros(3, dtype=torch.long)),
}
# Those that return numbers: what they are depends on the data.
COUNTS = {"rows_judge", "rows_turn"}


@pytest.mark.parametrize("name", CALLS)
def test_operators_do_what_they_say(name):
    arguments = CALLS[name]
    opcheck(getattr(torch.ops.opteq, name).default, arguments() if callable(arguments) else arguments)


def test_there_are_no_others():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("opteq::")}
    assert {name.removeprefix("opteq::") for name in names} == CALLS.keys() | COUNTS


def test_they_are_no_reason_to_load_what_is_slow_to_load():
    import subprocess
    import sys

    script = (
        "import sys, opteq, torch; layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Dense(3, 5),"
        " opteq.Dense(4, 5))); layer(torch.randn(2, 4)).sum().backward();"
        " sys.exit(str({'torch._dynamo', 'torch.utils.flop_counter', 'triton'} & sys.modules.keys() or ''))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr == "\n"
