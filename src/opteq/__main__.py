"""`python -m opteq` is the command `opteq`."""

import sys

from opteq.cli import main

sys.exit(main())
