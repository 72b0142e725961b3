"""What to say where there is no memory for something."""

import re

# PyTorch on processors and on accelerators, NumPy, and sizes that no address could reach.
_REPORTS = re.compile(
    r"can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes"
    r"|Tried to allocate (?P<torch>[\d.]+ \w+)"
    r"|Unable to allocate (?P<numpy>[\d.]+ \w+)"
    r"|Storage size calculation overflowed|numel: integer multiplication overflow"
)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def shortage(error: Exception) -> str | None:
    """Say how much memory an error is about; None if it is about something else."""
    found = _REPORTS.search(str(error))
    if found is None:
        return "There is not enough memory" if isinstance(error, MemoryError) else None
    size = found["torch"] or found["numpy"] or (found["bytes"] and _readable(int(found["bytes"])))
    size = size and size.replace(". ", " ")
    return f"There is no memory for {size or 'more bytes than can be counted'} at once"


def _readable(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
