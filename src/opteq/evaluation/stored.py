"""Records on disk."""

from __future__ import annotations

import math
import zipfile
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from opteq.errors import ConfigError
from opteq.system.files import write_beside


class Stored:
    """A dataclass that is kept as a file.

    Its fields are arrays, numbers, tuples of strings, and dataclasses of arrays.
    """

    __slots__ = ()

    def save(self, path: Path) -> None:
        """Write the record as a compressed `.npz` of plain arrays."""
        arrays: dict[str, Any] = {}
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            if isinstance(value, dict):
                arrays |= {f"{name}.{key}": array for key, array in value.items()}
            else:
                arrays[name] = value
        with write_beside(path) as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record that `save` wrote. Nothing in the file is executed.

        Raises:
            ConfigError: if the file is missing or is not such a record.
        """
        hints = get_type_hints(cls)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            return cls(**{f.name: _read(f.name, hints[f.name], arrays) for f in fields(cls)})  # type: ignore[arg-type]
        except FileNotFoundError:
            raise ConfigError(f"No test record at {path}: evaluate the run first.") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is not a complete test record ({error}): evaluate the run again."
            ) from error


def _read(name: str, kind: Any, arrays: dict[str, NDArray]) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{f.name: arrays[f"{name}.{f.name}"] for f in fields(kind)})
    if kind in (int, float):
        return kind(arrays[name])
    return tuple(map(str, arrays[name])) if kind == tuple[str, ...] else arrays[name]


def plain(value: Any) -> Any:
    """A value as JSON has it; numbers that are not known are null."""
    match value:
        case dict():
            return {key: plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case np.ndarray() | torch.Tensor():
            return plain(value.tolist())
        case float() if not math.isfinite(value):
            return None
    return value
