"""What of a trained network's hidden objective can be changed while one looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.base import EquilibriumMap
from opteq.maps.coupled import CoupledMap
from opteq.maps.gaussian import GaussianMap
from opteq.maps.hidden import HiddenReadout
from opteq.maps.parallel import Parallel
from opteq.maps.regularised import Regularised
from opteq.objectives.regularisers import AbsoluteNorm, Incay, Regulariser, SquaredNorm
from opteq.theory.exact import copied

# Each with the form that is sound for every γ; feature incay, which expands, has only the other one.
_REGULARISERS: dict[str, tuple[Regulariser, str]] = {
    "squared norm": (SquaredNorm(), "prox"),
    "absolute norm": (AbsoluteNorm(), "prox"),
    "feature incay": (Incay(), "gradient"),
}
# What each does to the features, in a line.
MEANINGS = {
    "squared norm": "½‖z‖² makes all features smaller.",
    "absolute norm": "‖z‖₁ makes features sparse: small ones become zero.",
    "feature incay": "2/(‖z‖² + 2) makes features larger; incay is the contrary of decay.",
}
# γ of a regulariser that the network was not trained with.
_STRENGTH = 0.01
TRAINED, NONE = "as trained", "none"


@dataclass(frozen=True, slots=True)
class Settings:
    """Changes to the equilibrium layers of a network; None leaves a number as it was trained.

    Attributes:
        coupling: `λ` of the diversity between branches.
        width: `γ` of Gaussian kernels.
        regulariser: `"as trained"`, `"none"`, or the name of one to be in the hidden objective instead.
        strength: `γ` of the regulariser.
    """

    coupling: float | None = None
    width: float | None = None
    regulariser: str = TRAINED
    strength: float | None = None


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that can be set on a logarithmic scale.

    Attributes:
        name: of the field of `Settings`.
        label: what it is called.
        value: as it was trained; None where it follows from the image or there is none.
        lowest: end of the scale.
        highest: end of the scale.
    """

    name: str
    label: str
    value: float | None
    lowest: float
    highest: float


def knobs(network: nn.Module) -> tuple[list[Knob], list[str]]:
    """The numbers that the network has to be set, and the regularisers that it can be given."""
    found: dict[str, Knob] = {}
    choices: list[str] = []
    for layer in _layers(network):
        for part in layer.map.modules():
            if isinstance(part, CoupledMap) and part.coupling is not None:
                value = part.coupling.weight
                found["coupling"] = Knob("coupling", "λ, weight of the diversity", value, 1e-4, 1.0)
            if isinstance(part, GaussianMap):
                width = None if isinstance(part.gamma, str) else float(part.gamma)
                found["width"] = Knob("width", "γ of the Gaussian kernel", width, 1e-4, 1e2)
        map = layer.map.map if isinstance(layer.map, HiddenReadout) else layer.map
        if not isinstance(map, CoupledMap | Parallel):
            value = map.gamma if isinstance(map, Regularised) else None
            found["strength"] = Knob("strength", "γ, weight of the regulariser", value, 1e-4, 1.0)
            choices = [TRAINED, *([] if value is None else [NONE]), *_REGULARISERS]
    return list(found.values()), choices


def changed(network: nn.Module, settings: Settings) -> nn.Module:
    """A copy of the network with the settings in force; the network itself where they change nothing.

    Raises:
        ConfigError: if the network has nothing of that kind to set, or a number is out of range.
    """
    if settings == Settings():
        return network
    network = copied(network)
    offered, choices = knobs(network)
    names = [knob.name for knob in offered]
    for name in ("coupling", "width", "strength"):
        if getattr(settings, name) is not None and name not in names:
            raise ConfigError(f"This network has no `{name}` to set; it has {', '.join(names) or 'none'}.")
    if settings.regulariser not in (TRAINED, *choices):
        raise ConfigError(
            f"There is no regulariser {settings.regulariser!r} for this network; there are"
            f" {', '.join(choices) or 'none'}."
        )
    for layer in _layers(network):
        for part in layer.map.modules():
            if isinstance(part, CoupledMap) and part.coupling is not None and settings.coupling is not None:
                part.coupling = replace(part.coupling, weight=settings.coupling)
            if isinstance(part, GaussianMap) and settings.width is not None:
                part.gamma = settings.width
        layer.map = _regularised(layer.map, settings)
    return network


def _layers(network: nn.Module) -> Iterator[EquilibriumLayer]:
    return (m for m in network.modules() if isinstance(m, EquilibriumLayer))


def _regularised(map: EquilibriumMap, settings: Settings) -> EquilibriumMap:
    if isinstance(map, HiddenReadout):
        regularised = _regularised(map.map, settings)
        return map if regularised is map.map else HiddenReadout(regularised)
    inner = map.map if isinstance(map, Regularised) else map
    if settings.regulariser == NONE:
        return inner
    if settings.regulariser != TRAINED:
        regulariser, form = _REGULARISERS[settings.regulariser]
    elif isinstance(map, Regularised):
        regulariser, form = map.regulariser, map.form
    elif settings.strength is None:
        return map
    else:
        raise ConfigError("The γ of a regulariser needs one: choose a regulariser first.")
    trained = map.gamma if isinstance(map, Regularised) else _STRENGTH
    return Regularised(inner, regulariser, trained if settings.strength is None else settings.strength, form)
