"""A look at the model and at one batch before anything is trained or written."""

from typing import Any

import torch
from torch import nn

from opteq.data.facts import Facts
from opteq.errors import ConfigError
from opteq.evaluation.passes import eval_mode
from opteq.models.loading import ModelCard
from opteq.models.parts import build
from opteq.system.shortage import shortage


def check_classes(card: ModelCard, data: Facts) -> None:
    """Check that a data set has the classes that a network was trained on, in their order.

    Raises:
        ConfigError: It has others.
    """
    trained, given = tuple(card.class_names), data.class_names
    if trained != given:
        lacking = [name for name in trained if name not in given] or ["none"]
        unknown = [name for name in given if name not in trained] or ["none"]
        raise ConfigError(
            f"The classes of {data.title} are not those that the network was trained on, in their order:"
            f" missing {', '.join(lacking[:10])}; unknown {', '.join(unknown[:10])}."
        )


@torch.no_grad()
def check_match(network: nn.Module, data: Facts) -> None:
    """Check that a network takes the images of a data set and has a logit for each of its classes.

    For segmentation it must have these at every pixel.

    Raises:
        ConfigError: It does not.
    """
    images, labels = data.sample
    channels, height, width = images.shape[1:]
    try:
        with eval_mode(network):
            logits = network(images[:2])
    except ConfigError:
        raise  # about an option of the network, whatever the images
    except (RuntimeError, ValueError) as error:
        if shortage(error):
            raise
        raise ConfigError(
            f"The network does not take the images of {data.title} ({channels} channels, "
            f"{height}×{width}): {error} Look at the options of --model.network that say how many channels "
            "and what size its parts have."
        ) from error
    classes = len(data.class_names)
    expected = (classes, *labels.shape[1:])
    if logits.ndim != len(expected) + 1:
        raise ConfigError(
            f"{data.title} is a data set for {data.task}, but the output of the network has shape "
            f"{tuple(logits.shape)}; choose another head with --model.network.head."
        )
    if logits.shape[1:] != expected:
        advice = (
            "set --model.network.head.classes null to have it follow from the data"
            if data.stage == "fit"
            else "give data with the classes that it was trained on"
        )
        raise ConfigError(
            f"{data.title} has {classes} classes, but the output of the network has shape "
            f"{tuple(logits.shape)}; {advice}."
        )
    if labels.is_floating_point() or labels.max() >= classes:
        raise ConfigError(
            f"Expected labels of {data.title} to be whole numbers below {classes}, one per class, got"
            f" {labels.dtype} up to {labels.max().item()}."
        )


def check_rebuilt(network: nn.Module, config: dict[str, Any]) -> None:
    """Check that a network can be built again of what is kept with its weights, see `opteq.load`.

    Args:
        network: The network.
        config: Its part of the configuration, in plain values.

    Raises:
        ConfigError: It cannot, or there results another one.
    """
    try:
        with torch.random.fork_rng():
            build(config, trust=True).load_state_dict(network.state_dict())
    except Exception as error:  # of the user's own classes, whatever it is
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"After its training this network could not be built again of its configuration ({reason}); give"
            " its parts as class_path with plain init_args, and functions by their names."
        ) from error
