import numpy as np
import pytest

from opteq import (
    SAM,
    Anderson,
    Broyden,
    Implicit,
    Nesterov,
    OneStep,
    Patches,
    Phantom,
    Picard,
    SquaredNorm,
    Unrolled,
)
from opteq.errors import ConfigError


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Implicit(method="lu"),
            "`method` of Implicit to be one of auto, cg, anderson, gmres, got 'lu'",
        ),
        (lambda: Implicit(max_steps=0), "`max_steps` of Implicit to be at least 1"),
        (lambda: Implicit(tol=0.0), r"`tol` of Implicit to be positive and finite, got 0\.0"),
        (lambda: Anderson(tol=-1), "`tol` of Anderson to be positive and finite, got -1"),
        (lambda: Picard(tol=float("nan")), "`tol` of Picard to be positive and finite, got nan"),
        (lambda: Nesterov(tol=float("inf")), "`tol` of Nesterov to be positive and finite, got inf"),
        (lambda: Broyden(tol=0), "`tol` of Broyden to be positive and finite, got 0"),
        (lambda: Anderson(memory=0), "`memory` of Anderson to be at least 1, got 0"),
        (lambda: Anderson(damping=0), r"`damping` of Anderson to be in \(0, 1\], got 0"),
        (lambda: Anderson(damping=1.1), r"`damping` of Anderson to be in \(0, 1\], got 1\.1"),
        (lambda: Broyden(memory=0), "`memory` of Broyden to be at least 1, got 0"),
        (lambda: Phantom(steps=0), "`steps` of Phantom to be at least 1, got 0"),
        (lambda: Phantom(damping=0.0), r"`damping` of Phantom to be in \(0, 1\], got 0\.0"),
        (lambda: Phantom(damping=1.1), r"`damping` of Phantom to be in \(0, 1\], got 1\.1"),
        (lambda: Phantom(form="series"), "`form` of Phantom to be 'unroll' or 'neumann', got 'series'"),
        (lambda: Unrolled(0), "`steps` of Unrolled to be at least 1, got 0"),
        (lambda: Unrolled(1, select=2), r"`select` of Unrolled to be a SAM\(regulariser\) or None, got 2"),
        (lambda: Unrolled(1, error=-1), "`error` of Unrolled to be at least 0 and below 1, got -1"),
        (lambda: Unrolled(1, error=float("nan")), "`error` of Unrolled to be at least 0 and below 1"),
        (lambda: Implicit(tolerance=1), "Implicit has no option 'tolerance'; it has tol, max_steps, method"),
        (lambda: Phantom(lam=1), "Phantom has no option 'lam'; it has steps, damping, form"),
        (lambda: OneStep(steps=1), "OneStep has no option 'steps'"),
        (lambda: Unrolled(3, checkpointing=True), "no option 'checkpointing'; it has steps, checkpoint"),
    ],
)
def test_options_out_of_range_or_unknown_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Anderson(tol="x"), "`tol` of Anderson to be a number, got 'x'"),
        (lambda: Anderson(1e-3, 2.5), "`max_steps` of Anderson to be a whole number, got 2.5"),
        (lambda: Anderson(memory=True), "`memory` of Anderson to be a whole number, got True"),
        (lambda: Patches(size=None), "`size` of Patches to be a whole number, got None"),
        (lambda: Unrolled(3, checkpoint=1), "`checkpoint` of Unrolled to be True or False, got 1"),
        (lambda: SAM(SquaredNorm(), gamma="a"), "`gamma` of SAM to be a number or None, got 'a'"),
    ],
)
def test_options_of_another_type_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_options_at_the_ends_of_their_ranges_are_taken():
    assert Anderson(max_steps=1, memory=1, damping=1).memory == 1
    assert Broyden(memory=1).memory == 1
    assert Phantom(steps=1, damping=1).steps == 1
    assert Unrolled(1).steps == 1


def test_numbers_of_numpy_are_numbers():
    assert Anderson(np.float32(0.5), np.int64(7)).max_steps == 7
    assert Anderson(tol=1).tol == 1
