"""What the page shows of one network, in plain values that become JSON."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms import functional

from opteq.data.images import read_image, read_pixels
from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError, OpteqError
from opteq.evaluation.attacks import PGD
from opteq.evaluation.display import displayable
from opteq.evaluation.passes import refuse_non_finite
from opteq.evaluation.saliency import grad_cam
from opteq.evaluation.trace import first_call, read_as
from opteq.layer import EquilibriumLayer
from opteq.models.loading import ModelCard
from opteq.results import State, map_state, norm, residual_text, tensors_of
from opteq.show.iteration import Iteration, iterate, logits_along
from opteq.show.pictures import heat_picture, image_picture, mask_colours, mask_picture, state_picture
from opteq.show.settings import MEANINGS, Settings, changed, knobs
from opteq.theory.certificates import certify
from opteq.theory.exact import copied, in_float64
from opteq.theory.minimisers import certified_convex
from opteq.theory.robustness import robust_radius

# Bytes of an image file, and uploads that are kept.
MOST_BYTES = 20 * 2**20
_KEPT_UPLOADS = 16
# Classes with a bar, and channels with a picture.
_MOST_CLASSES = 6
_SHOWN_CHANNELS = 3
_ATTACK_STEPS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """An image as the network takes it, and what is known about it.

    Attributes:
        image: `(1, channels, height, width)`.
        name: what it is called.
        label: its true class, or `(height, width)` those of its pixels, below 0 where none is known; None for
            an image of which nothing is known.
    """

    image: Tensor
    name: str
    label: Tensor | None = None


class Viewer:
    """A network, what it takes, and the images to show it on.

    One thread may ask for certificates, which take seconds, while another one asks for the rest.

    Args:
        title: what the network is called.
        network: the network, in eval mode.
        card: what it takes and what its logits stand for.
        samples: images of its test set.
        absent: why there are no such images, a sentence; empty where there are.
    """

    def __init__(
        self, title: str, network: nn.Module, card: ModelCard, samples: list[Sample], absent: str = ""
    ) -> None:
        self.title, self.network, self.card, self.absent = title, network, card, absent
        # Of its own: what else is asked for hooks into the network meanwhile, which no certificate allows.
        self._certified = copied(network)
        self._normalization = Normalization(card.mean, card.std)
        self._images = {f"test-{i}": sample for i, sample in enumerate(samples)}
        for layer in (*network.modules(), *self._certified.modules()):
            if isinstance(layer, EquilibriumLayer):
                layer.on_unconverged = "count"  # The page says it.

    def describe(self) -> dict[str, Any]:
        """The network, the images there are, and what can be changed."""
        numbers, regularisers = knobs(self.network)
        layers = [m for m in self.network.modules() if isinstance(m, EquilibriumLayer)]
        return {
            "title": self.title,
            "map": layers[0].map.title if layers else "no equilibrium layer",
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "classes": list(self.card.class_names),
            "task": self.card.task,
            "absent": self.absent,
            "images": [self._entry(key) for key in self._images],
            "knobs": [asdict(knob) for knob in numbers],
            "regularisers": regularisers,
            "meanings": MEANINGS,
            "statements": list(_STATEMENTS),
        }

    def add(self, name: str, content: bytes) -> dict[str, Any]:
        """Take in the content of an image file, brought to the network's input as predictions do.

        A file that is there already, by content and name, becomes the newest one.

        Raises:
            ConfigError: if it is too large or cannot be read as an image.
        """
        # A name from a browser is for the reader only, and must not lead out of the folder.
        name = PurePath(name.replace("\\", "/")).name[-100:].replace("\0", "") or "image"
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{name} has {len(content) / 2**20:.0f} MB, more than the {MOST_BYTES // 2**20} that an image"
                " may have; make it smaller."
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "image"
            path.write_bytes(content)
            try:
                pixels = self._read(path)
            except ConfigError as error:
                raise ConfigError(
                    f"{name} is not an image that can be read; choose a picture such as a PNG or JPEG file."
                ) from error
        batch, _ = Preprocess(self._normalization)((pixels[None], torch.zeros(1, dtype=torch.long)))
        key = f"own-{sha256(name.encode() + bytes(1) + content).hexdigest()[:16]}"
        self._images.pop(key, None)
        self._images[key] = Sample(batch, name)
        own = [other for other in self._images if other.startswith("own-")]
        for old in own[:-_KEPT_UPLOADS]:
            del self._images[old]
        return self._entry(key)

    def equilibrium(self, key: str, settings: Settings) -> dict[str, Any]:
        """The way of an image to its equilibrium: pictures, residual, hidden objective and predictions.

        Raises:
            ConfigError: for an image that is not there, settings that do not fit, or a network without an
                equilibrium layer.
            NonFiniteError: if what comes out is NaN or infinite.
        """
        network, image = changed(self.network, settings), self._image(key)
        iteration = iterate(network, image)
        names, rows = _pictures(iteration)
        logits = logits_along(network, image, iteration)
        refuse_non_finite(logits[-1])
        steps = [*map(str, iteration.steps), "*"]
        places = [*iteration.steps, None]
        return {
            "image": image_picture(displayable(image, self._normalization)[0]),
            "pictures": names,
            "residual": _finite(iteration.residual),
            "objective": None if iteration.objective is None else _finite(iteration.objective),
            "lowest": iteration.lowest,
            "tolerance": iteration.tolerance,
            "outcome": _outcome(iteration),
            "read": read_as(iteration.layer),
            **self._predictions(logits),
            "frames": [
                {"step": step, "place": place, "pictures": row}
                for step, place, row in zip(steps, places, rows, strict=True)
            ],
        }

    def certificate(self, key: str, settings: Settings, statement: str) -> str:
        """One of the `statements` of `describe`, what is certain about the equilibrium of an image.

        Raises:
            ConfigError: as `equilibrium` does, or if there is no such statement.
        """
        if statement not in _STATEMENTS:
            raise ConfigError(
                f"There is no statement {statement!r} in a certificate; there are {', '.join(_STATEMENTS)}."
            )
        network, image = changed(self._certified, settings), self._image(key)
        try:
            return _STATEMENTS[statement](network, image, self.card)
        except OpteqError as error:
            return f"Not available: {error}"

    def attention(self, key: str, settings: Settings) -> dict[str, Any]:
        """Grad-CAM of the class that is predicted, as a picture to lay over the image.

        Raises:
            ConfigError: if the network classifies pixels or has no features with height and width.
        """
        _expect_classifier(self.card, "Grad-CAM")
        network, image = changed(self.network, settings), self._image(key)
        return {"picture": heat_picture(grad_cam(network, image)[0].numpy())}

    def attack(self, key: str, settings: Settings, epsilon: float) -> dict[str, Any]:
        """What a projected gradient attack of 20 steps makes of an image and of its prediction.

        Args:
            key: the image.
            settings: changes to the network.
            epsilon: `ε`, the largest change of a pixel, of 1.

        Raises:
            ConfigError: for a network that classifies pixels, or an `epsilon` out of range.
        """
        _expect_classifier(self.card, "An attack")
        network, image = changed(self.network, settings), self._image(key)
        with torch.no_grad():
            before = network(image)
        label = before.argmax(1)
        attack = PGD(steps=_ATTACK_STEPS, epsilon=epsilon, step_size=None, random_start=False)
        attacked, blind = attack.attack(network, image, label, self._normalization)
        with torch.no_grad():
            after = network(attacked)
        return {
            "image": image_picture(displayable(attacked, self._normalization)[0]),
            **self._predictions([before, after]),
            "changed": bool(after.argmax(1) != label),
            "blind": bool(blind),
        }

    def _entry(self, key: str) -> dict[str, Any]:
        sample = self._images[key]
        names, label, truth = self.card.class_names, sample.label, {}
        if label is not None:
            truth = (
                {"mask": mask_picture(label.numpy(), len(names))}
                if label.dim()
                else {"class": names[int(label)]}
            )
        picture = image_picture(displayable(sample.image, self._normalization)[0])
        return {"key": key, "name": sample.name, "picture": picture, "truth": truth}

    def _image(self, key: str) -> Tensor:
        if key not in self._images:
            raise ConfigError("This image is not here any more; choose it anew.")
        return self._images[key].image

    def _read(self, path: Path) -> Tensor:
        size, channels = self.card.image_size, self.card.in_channels
        if isinstance(size, int):
            return read_image(path, channels, size)
        return functional.resize(read_pixels(path, channels), list(size), antialias=True)

    def _predictions(self, logits: list[Tensor]) -> dict[str, Any]:
        """What the logits of one image, one tensor after the other, say."""
        names = self.card.class_names
        if self.card.task == "segmentation":
            labels = [t[0].argmax(0).numpy() for t in logits]
            counts = [np.bincount(mask.ravel(), minlength=len(names)) / mask.size for mask in labels]
            best = _likeliest(list(map(torch.from_numpy, counts)))
            colours = mask_colours(len(names))
            return {
                "classes": [names[c] for c in best],
                "colours": [colours[c] for c in best],
                "shares": [[float(share[c]) for c in best] for share in counts],
                "masks": [mask_picture(mask, len(names)) for mask in labels],
            }
        shares = [t.softmax(1)[0] for t in logits]
        best = _likeliest(shares)
        return {
            "classes": [names[c] for c in best],
            "shares": [_finite([float(share[c]) for c in best]) for share in shares],
            "labels": [names[int(share.argmax())] for share in shares],
        }


def _likeliest(shares: list[Tensor]) -> list[int]:
    """The classes with the largest last shares, and those that led on the way."""
    last = shares[-1]
    best = last.argsort(descending=True, stable=True)[:_MOST_CLASSES].tolist()
    led = dict.fromkeys(int(share.argmax()) for share in shares)
    others = [c for c in led if c not in best]
    kept = best[: max(_MOST_CLASSES - len(others), 1)] + others[: _MOST_CLASSES - 1]
    return sorted(kept, key=lambda c: -float(last[c]))


def _pictures(iteration: Iteration) -> tuple[list[str], list[list[str]]]:
    """Names of the pictures, and the pictures of each state in turn, the equilibrium last.

    Each has one colour scale for all states.
    """
    states = [*iteration.states, iteration.equilibrium]
    columns: list[tuple[str, list[NDArray]]] = []
    branches = [list(map(_as_maps, parts)) for parts in zip(*map(tensors_of, states), strict=True)]
    for number, maps in enumerate(branches, start=1):
        where = f" of branch {number}" if len(branches) > 1 else ""
        size = "×".join(map(str, maps[-1].shape[1:]))
        columns.append((f"all channels{where}, {size}", [np.sqrt((m**2).mean(0)) for m in maps]))
    # The channels that vary most over the image, of the first branch.
    maps = branches[0]
    spread = maps[-1].reshape(len(maps[-1]), -1).var(1)
    for channel in np.argsort(-spread, kind="stable")[:_SHOWN_CHANNELS] if len(maps[-1]) > 1 else []:
        columns.append((f"channel {channel}", [m[channel] for m in maps]))
    rows: Iterator[tuple[str, ...]] = zip(*(_drawn(values) for _, values in columns), strict=True)
    return [name for name, _ in columns], list(map(list, rows))


def _as_maps(state: Tensor) -> NDArray:
    """One sample's `(channels, h, w)`; a state without height and width as one strip."""
    maps = state[0] if state.dim() == 4 else state[0].reshape(1, 1, -1)
    return np.nan_to_num(maps.float().numpy())


def _drawn(values: list[NDArray]) -> list[str]:
    lowest, highest = min(0.0, float(values[-1].min())), float(values[-1].max())
    return [state_picture(v, lowest, highest) for v in values]


def _outcome(iteration: Iteration) -> str:
    """How the layer's own solve ended, a sentence."""
    steps, residual = int(iteration.info.steps[0]), residual_text(float(iteration.info.residual[0]))
    if iteration.tolerance is None:
        return f"The network takes {steps} plain iterations, which end at a residual of {residual}."
    assert iteration.layer.solver is not None
    method = type(iteration.layer.solver).__name__
    if not bool(iteration.info.converged[0]):
        return (
            f"{method} did not reach the tolerance of {iteration.tolerance:g} in {steps} evaluations of T:"
            f" the residual is {residual}, and what is shown as z* is no equilibrium."
        )
    return f"{method} found z* in {steps} evaluations of T, at a residual of {residual}."


def _expect_classifier(card: ModelCard, what: str) -> None:
    if card.task != "classification":
        raise ConfigError(f"{what} is for networks that classify whole images; this one classifies pixels.")


@torch.no_grad()
def _first_call(network: nn.Module, image: Tensor) -> tuple[EquilibriumLayer, State]:
    call = first_call(network, image)
    if call is None:
        raise ConfigError("This network has no equilibrium layer: there is nothing to certify.")
    return call


@torch.no_grad()
def _distance(network: nn.Module, image: Tensor, card: ModelCard) -> str:
    layer, x = _first_call(network, image)
    certificate = certify(layer, x)
    bound, size = float(certificate.distance.value), float(norm(layer.solve(x).value))
    read = read_as(layer)
    if not math.isfinite(bound):
        return (
            "Not available: the map is not known to bring all states closer to one another, without which no"
            " bound on the distance holds."
        )
    known = "at most" if certificate.distance.kind != "estimate" else "by an estimate about"
    return f"‖{read} - {read}*‖ is {known} {bound:.3g}, beside ‖{read}‖ = {size:.3g}."


@torch.no_grad()
def _kind(network: nn.Module, image: Tensor, card: ModelCard) -> str:
    layer, x = _first_call(network, image)
    if bool(certified_convex(in_float64(layer).bind(map_state(Tensor.double, x)).curvature())):
        return "The hidden objective is convex, by a bound: z* is its minimum, over all states."
    return (
        "The hidden objective is stationary at z*; that it is convex, and z* its minimum, is not certified."
    )


def _radius(network: nn.Module, image: Tensor, card: ModelCard) -> str:
    _expect_classifier(card, "A robust radius")
    # In pixels of 1 an input moves by at least the smallest deviation times what it moves normalised.
    radius = float(robust_radius(network, image)) * min(card.std)
    if math.isinf(radius):
        return "No image at all is given another class."
    return (
        f"No image that differs by less than {radius:.2g} (Euclidean norm over all pixels, black 0 and"
        " white 1) is given another class."
    )


# What a certificate says, by the names that the page gives it.
_STATEMENTS: dict[str, Callable[[nn.Module, Tensor, ModelCard], str]] = {
    "Distance to the optimum": _distance,
    "What the equilibrium is": _kind,
    "Robust radius": _radius,
}


def _finite(values: list[float]) -> list[float | None]:
    """`values` as JSON has them, which knows no NaN and no infinity."""
    return [value if math.isfinite(value) else None for value in values]
