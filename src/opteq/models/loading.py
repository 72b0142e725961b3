"""Networks on disk: weights as safetensors, beside them a card that says what they belong to."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from opteq.errors import ConfigError, NonFiniteError
from opteq.models.parts import build
from opteq.models.pretrained import CARD, FOLDER, pretrained
from opteq.options import check, is_number, is_whole
from opteq.spelling import run_meant
from opteq.system.files import write_file, write_json

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is needed to use the weights of a network.

    Attributes:
        network: How to build the network: `class_path` and `init_args`.
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
        """Read the card in the folder of a run, or of a pretrained network.

        Raises:
            ConfigError: There is none, or it is damaged.
        """
        path = folder_of(run) / CARD
        if not path.is_file():
            otherwise = (
                "give the folder of a finished run, or the name of a pretrained network:"
                f" {', '.join(pretrained())}."
            )
            hint = run_meant(str(run), CARD, otherwise, pretrained())
            raise ConfigError(f"{run} holds no trained model ({CARD}); {hint}")
        try:
            card = cls(**json.loads(path.read_text(encoding="utf-8")))
            card._check()
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged ({error}); restore it or train again.") from error
        return card

    def _check(self) -> None:
        sizes = self.image_size if isinstance(self.image_size, list | tuple) else [self.image_size] * 2
        expected = {
            "network": isinstance(self.network, dict),
            "class_names": isinstance(self.class_names, list | tuple)
            and len(self.class_names) > 0
            and all(isinstance(name, str) for name in self.class_names),
            "in_channels": is_whole(self.in_channels) and self.in_channels >= 1,
            "image_size": len(sizes) == 2 and all(is_whole(size) and size >= 1 for size in sizes),
            "mean": _are_numbers(self.mean, self.in_channels),
            "std": _are_numbers(self.std, self.in_channels) and all(value > 0 for value in self.std),
            "task": self.task in ("classification", "segmentation"),
        }
        wrong = [name for name, fits in expected.items() if not fits]
        if wrong:
            raise ValueError(f"{wrong[0]} is {getattr(self, wrong[0])!r}")


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list | tuple) and len(values) == count and all(map(is_number, values))


def save_network(folder: Path, network: nn.Module, card: ModelCard) -> None:
    """Write the weights and the card into `folder`; `load` reads them."""
    # A copy of each tensor, because safetensors refuses weights that share memory.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}
    write_file(folder / WEIGHTS, save(weights))
    write_json(folder / CARD, asdict(card))


def load(run: str | Path, trust: bool = False) -> nn.Module:
    """Load the network of a finished run, or a pretrained one, in eval mode, on the CPU.

    Only tensors are read. Only classes of opteq and modules of `torch.nn` are built, so that loading executes
    no foreign code, unless the run is trusted: then its model may have any classes that can be imported.

    Args:
        run: Folder of the run, for example `"runs/digits"`, or a name in `pretrained()`, such as
            `"digits"`.
        trust: Whether to import and build what it names.

    Raises:
        ConfigError: The folder holds no model, the model is damaged, or of a class that is not trusted.
        NonFiniteError: Weights are NaN or infinite.
    """
    check(isinstance(run, str | Path), "run", run, "the folder of a run, such as 'runs/digits'")
    folder = folder_of(run)
    network = build(ModelCard.read(folder).network, trust)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{folder / CARD} does not describe a network.")
    try:
        weights = load_file(folder / WEIGHTS)
        expect_weights(network, weights, folder / WEIGHTS)
        network.load_state_dict(weights)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{folder / WEIGHTS} is missing, truncated or of another model ({reason}); restore it or train"
            " again."
        ) from error
    return network.eval()


def expect_weights(network: nn.Module, weights: Mapping[str, Tensor], file: str | Path) -> None:
    """Raise an error for weights that torch would copy without a word, though no network can use them.

    Names and shapes are for `load_state_dict` to compare. Infinities that the network has itself, as in the
    mask of an attention, are its own.

    Args:
        network: What is to have the weights.
        weights: By the names of its `state_dict`.
        file: Where they are from.

    Raises:
        ConfigError: One is of whole numbers, truth values or complex numbers where the network's is real.
        NonFiniteError: One is NaN or infinite.
    """
    for name, own in network.state_dict().items():
        given = weights.get(name)
        if given is None or given.shape != own.shape or not own.is_floating_point():
            continue
        if not given.is_floating_point():
            raise ConfigError(
                f"{file} holds no weights for this network: {name} is of {given.dtype} in place of"
                f" {own.dtype}; save the weights as floating-point numbers."
            )
        given = given.to(own.dtype)
        finite = given.isfinite()
        if not finite.all() and not (finite | (given == own.to(given.device))).all():
            raise NonFiniteError(
                f"{file} holds weights that are NaN or infinite in {own.dtype}, among them {name}, as when a"
                " training diverges; use an earlier checkpoint, or train with a lower learning rate."
            )


def folder_of(run: str | Path) -> Path:
    """The folder of a run, or of a pretrained network; one's own comes before a network of its name."""
    folder = Path(run)
    return FOLDER / folder if not folder.exists() and str(run) in pretrained() else folder
