"""Measurements of opteq against its peers and against the operators themselves: `python -m benchmarks`."""

import os

# The profiler behind the memory figures greets on stderr unless this is set before PyTorch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
