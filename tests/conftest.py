import os

# Before torch is imported, and inherited by the processes that tests start: see `make unit`.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# The gate gives the same answer every time, and does not measure time.
settings.register_profile("opteq", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("opteq")
