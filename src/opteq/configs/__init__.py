"""The packaged configurations.

Each file starts with three lines of comments: what it trains, the number of parameters, and the
result to expect.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from opteq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    """What the comments of a packaged configuration say.

    Attributes:
        name: What `--config` calls it.
        description: What it trains.
        parameters: Number of parameters of the network.
        expected: Result, time and hardware.
    """

    name: str
    description: str
    parameters: int
    expected: str


def presets() -> list[Preset]:
    """All packaged configurations, by name."""
    return [_read(name, path) for name, path in sorted(_paths().items())]


def resolve_config(name_or_file: str) -> Path:
    """The file of a packaged configuration, or the file itself.

    Raises:
        ConfigError: It is neither.
    """
    paths = _paths()
    if name_or_file in paths:
        return paths[name_or_file]
    if Path(name_or_file).is_file():
        return Path(name_or_file)
    close = get_close_matches(name_or_file, paths)
    hint = f"did you mean {' or '.join(close)}?" if close else f"presets are {', '.join(sorted(paths))}."
    raise ConfigError(f"{name_or_file} is neither a preset nor a file; {hint}")


def _paths() -> dict[str, Path]:
    folder = Path(str(files(__name__)))
    return {path.stem: path for path in folder.glob("*.yaml")}


def _read(name: str, path: Path) -> Preset:
    text = path.read_text(encoding="utf-8")
    found = re.match(r"# (.+)\n# parameters: ([\d,]+)\n# expected: (.+)\n", text)
    if found is None:
        raise ConfigError(f"{path} does not start with its description, parameters and expected result.")
    description, parameters, expected = found.groups()
    return Preset(name, description, int(parameters.replace(",", "")), expected)
