"""What nothing keeps within its limits, watched while it is trained."""

from __future__ import annotations

from collections.abc import Callable

from opteq.tensors.tracing import tracing, transforming

# Solves of a training for each look at a norm, which costs some products for a single sample.
_EVERY = 20


class Watch:
    """Notices when what was within its limits no longer is."""

    def __init__(self) -> None:
        self._trained, self._beyond = 0, False

    def notices(self, training: bool, beyond: Callable[[], bool]) -> bool:
        """Whether a limit is exceeded that was kept when it was last looked at.

        In training that is the first time and every twentieth; in eval mode every time, as an estimate of
        weights that stay the same costs next to nothing.

        Args:
            training: whether the weights are being trained.
            beyond: whether the limit is exceeded.
        """
        # Neither looks at numbers.
        if tracing() or transforming():
            return False
        due = not training or self._trained % _EVERY == 0
        self._trained += training
        if not due:
            return False
        before, self._beyond = self._beyond, beyond()
        return self._beyond and not before
