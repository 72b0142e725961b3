"""The packaged configurations.

Each file starts with three lines of comments: what it trains, the number of parameters, and the
result to expect.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from opteq.errors import ConfigError
from opteq.spelling import did_you_mean

# Values in a configuration; references may make a small file a huge one.
LARGEST = 100_000


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

    @property
    def measured(self) -> bool:
        """Whether the result is one of this package."""
        return not self.expected.startswith("not measured")


def presets() -> list[Preset]:
    """All packaged configurations: those with a measured result, then the others, each by name."""
    read = [_read(name, path) for name, path in packaged(__name__).items()]
    return sorted(read, key=lambda preset: (not preset.measured, preset.name))


def resolve_config(name_or_file: str) -> Path:
    """The file of a packaged configuration, or the file itself.

    Raises:
        ConfigError: It is neither.
    """
    return find_file(name_or_file, packaged(__name__), "preset")


def read_config(name_or_file: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The options in a packaged configuration or a file.

    Args:
        name_or_file: What the user wrote.
        above: The files whose base it is, one after the other.

    Raises:
        ConfigError: It is neither, or does not hold options.
    """
    path = resolve_config(name_or_file)
    if path.resolve() in above:
        raise ConfigError(f"{path} is its own base; name another one.")
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"Expected {path} to hold options such as trainer: {{max_epochs: 5}}, got {content!r}."
        )
    return with_base(content, (*above, path.resolve()))


def with_base(options: Mapping[str, Any], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """`options`, laid over those of the configuration that they name as their `base`, if they name one."""
    own = {name: value for name, value in options.items() if name != "base"}
    return overlaid(read_config(str(options["base"]), above), own) if "base" in options else own


def overlaid(below: Any, above: Any) -> Any:
    """Mappings are joined, name by name; anything else, and another class, replaces what was there."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if above.get("class_path", below.get("class_path")) != below.get("class_path"):
        return above
    return {**below, **{name: overlaid(below.get(name), value) for name, value in above.items()}}


def find_file(name_or_file: str, known: Mapping[str, Path], kind: str) -> Path:
    """The file of that name among `known`, or the file itself.

    Args:
        name_or_file: what the user wrote.
        known: packaged files by name.
        kind: what they are called, in the singular.

    Raises:
        ConfigError: It is neither.
    """
    path = known.get(name_or_file, Path(name_or_file))
    if path.is_file():
        return path
    hint = did_you_mean(name_or_file, known, f"{kind}s are {', '.join(sorted(known))}.")
    raise ConfigError(f"{name_or_file} is neither a {kind} nor a file; {hint}")


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: It is no YAML file.
    """
    import yaml  # here, so that who has installed the layers alone can ask the command what there is

    try:
        # PyYAML's wheels have both, and the one in C takes a tenth of the time.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        if _size(content, {}) > LARGEST:
            raise ConfigError(f"{path} repeats itself without end or too often; write out what it refers to.")
        return content
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file; give a configuration in YAML.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; give a configuration in YAML.") from error


def _size(content: Any, known: dict[int, float]) -> float:
    """Number of values that `content` has written out, infinite where it refers to itself."""
    if not isinstance(content, Mapping | list):
        return 1
    if id(content) not in known:
        known[id(content)] = math.inf
        values = content.values() if isinstance(content, Mapping) else content
        known[id(content)] = 1 + sum(_size(value, known) for value in values)
    return known[id(content)]


@cache
def packaged(package: str) -> dict[str, Path]:
    """The YAML files in a package, by name."""
    return {path.stem: path for path in Path(str(files(package))).glob("*.yaml")}


def _read(name: str, path: Path) -> Preset:
    text = path.read_text(encoding="utf-8")
    found = re.match(r"# (.+)\n# parameters: ([\d,]+)\n# expected: (.+)\n", text)
    if found is None:
        raise ConfigError(f"{path} does not start with its description, parameters and expected result.")
    description, parameters, expected = found.groups()
    return Preset(name, description, int(parameters.replace(",", "")), expected)
