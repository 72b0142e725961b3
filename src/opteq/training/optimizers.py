"""Optimizers of any class, for the learning rate and weight decay of a training."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch.optim import Optimizer

from opteq.errors import ConfigError

# What a training gives to each group of parameters, and its own option for that.
_OF_THE_TRAINING = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def make_optimizer(
    make: Callable[[Sequence[dict[str, Any]]], Optimizer], groups: Sequence[dict[str, Any]]
) -> Optimizer:
    """Make an optimizer of groups of parameters that have their `lr` and `weight_decay`.

    Args:
        make: A class of optimizers with its options, or another function of the groups.
        groups: The groups.

    Raises:
        ConfigError: It does not take such groups, knows no learning rate, or was given one, or a weight
            decay, of its own, which those of the groups would silently replace.
    """
    try:
        optimizer = make(groups)
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"The optimizer cannot be made ({error}); choose another --model.optimizer."
        ) from error
    name = type(optimizer).__name__
    parameters = signature(type(optimizer)).parameters
    for option, ours in _OF_THE_TRAINING.items():
        value = optimizer.defaults.get(option)
        if option in parameters and value != parameters[option].default:
            raise ConfigError(
                f"{name} was given `{option}` {value}; set --model.{ours}, which holds for every optimizer."
            )
    if any(group["weight_decay"] for group in groups) and "weight_decay" not in optimizer.defaults:
        raise ConfigError(f"{name} has no weight decay; set --model.weight_decay 0.")
    return optimizer
