"""Networks on disk: weights as safetensors, beside them a card that says what they belong to."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from inspect import isclass
from pathlib import Path
from typing import Any, Literal, Self

from safetensors import SafetensorError
from safetensors.torch import load_model, save
from torch import nn

from opteq.errors import ConfigError
from opteq.files import write_file, write_json

WEIGHTS = "model.safetensors"
CARD = "model.json"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is needed to use the weights of a network.

    Attributes:
        network: How to build the network: `class_path` of a class of opteq and its `init_args`.
        class_names: Name of the class that each logit stands for.
        in_channels: Channels of the images, 1 or 3.
        image_size: Height and width of the images, one number where they are equal.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        task: Whether the logits are those of an image or of each of its pixels.
    """

    network: dict[str, Any]
    class_names: tuple[str, ...]
    in_channels: int
    image_size: int | tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    task: Literal["classification", "segmentation"] = "classification"

    @classmethod
    def read(cls, run: str | Path) -> Self:
        """Read the card in the folder of a run.

        Raises:
            ConfigError: There is none, or it is damaged.
        """
        path = Path(run) / CARD
        if not path.is_file():
            raise ConfigError(f"{run} holds no trained model ({CARD}); give the folder of a finished run.")
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); restore it or train again.") from error


def save_network(folder: Path, network: nn.Module, card: ModelCard) -> None:
    """Write the weights and the card into `folder`; `load` reads them."""
    # A copy of each tensor, because safetensors refuses weights that share memory.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
    write_file(folder / WEIGHTS, save(weights))
    write_json(folder / CARD, asdict(card))


def load(run: str | Path) -> nn.Module:
    """Load the network of a finished run in eval mode, on the CPU.

    Only classes of opteq are built and only tensors are read: loading executes no foreign code.

    Args:
        run: Folder of the run, for example `"runs/digits"`.

    Raises:
        ConfigError: The folder holds no model, the model is damaged, or it is not one of opteq's.
    """
    folder = Path(run)
    network = build(ModelCard.read(folder).network)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{folder / CARD} does not describe a network.")
    try:
        load_model(network, folder / WEIGHTS)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder / WEIGHTS} is missing, truncated or of another model: {error}") from error
    return network.eval()


def build(spec: Any) -> Any:
    """Build what a `class_path` with its `init_args` describes, here and in nested arguments.

    Raises:
        ConfigError: A class is not one of opteq's, or does not take the arguments.
    """
    if isinstance(spec, list):
        return [build(item) for item in spec]
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        return spec
    class_path, arguments = spec["class_path"], spec.get("init_args", {})
    if not isinstance(class_path, str) or not isinstance(arguments, Mapping):
        raise ConfigError(f"Expected a class_path with a mapping of init_args, got {dict(spec)}.")
    cls = _find_class(class_path)
    arguments = {name: build(value) for name, value in arguments.items()}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ConfigError(f"Could not build {spec['class_path']}: {error}.") from error


def _find_class(class_path: str) -> type:
    module_name, _, name = class_path.rpartition(".")
    if module_name.split(".")[0] != "opteq":
        raise ConfigError(
            f"The model uses {class_path}, and only classes of opteq are loaded; build that network "
            f"yourself and load {WEIGHTS} into it with safetensors.torch.load_model."
        )
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"This version of opteq has no {class_path}.") from error
    # A module of opteq also holds what it imports from elsewhere.
    if not (isclass(cls) and cls.__module__.startswith("opteq.")):
        raise ConfigError(f"{class_path} is not a class of opteq.")
    return cls
