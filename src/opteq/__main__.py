"""The program: `opteq`, or `python -m opteq`."""

import sys

from opteq.interrupts import interrupted


def main() -> int:
    """Run the command, of which an interrupt is told in a sentence also while it is still being imported."""
    try:
        from opteq.cli import main as run
    except KeyboardInterrupt:
        return interrupted()
    return run()


if __name__ == "__main__":
    sys.exit(main())
