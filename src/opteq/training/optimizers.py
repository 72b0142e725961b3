"""Optimizers of any class, for the learning rate and weight decay of a training."""

from __future__ import annotations

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


def take_options(checkpoint: dict[str, Any], fresh: Optimizer) -> bool:
    """Give the optimizer and the schedule of a checkpoint the options of a fresh optimizer.

    From a checkpoint torch reads learning rate, weight decay and the like together with the averages, so that
    new ones would be ignored in silence. The rate keeps its place on its schedule.

    Args:
        checkpoint: what a training of one optimizer and one schedule goes on from; changed in place.
        fresh: an optimizer of the same parameters with the options to take.

    Returns:
        Whether the averages are kept; those of another kind of optimizer are dropped.
    """
    (state,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    groups = list(zip(state["param_groups"], fresh.param_groups, strict=True))
    kept = all(new.keys() <= old.keys() for old, new in groups)
    for old, new in groups:
        peak = old["initial_lr"]
        # Where averaging of the weights has begun it has a rate of its own. One that is as it was is not
        # computed anew: the training is to be the same to the last bit.
        if "swa_lr" not in old and new["lr"] != peak:
            old |= {"lr": old["lr"] / peak * new["lr"], "initial_lr": new["lr"]}
        if not kept:
            for name in old.keys() - new.keys() - {"initial_lr"}:
                del old[name]
        old |= {name: option for name, option in new.items() if name not in ("params", "lr")}
    schedule["base_lrs"] = [old["initial_lr"] for old, _ in groups]
    if not kept:
        state["state"] = {}
    return kept
