"""One epoch of a real classifier: images per second of one network around different middles."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import Counter, counted, run_torchdeq, torchdeq_anderson
from benchmarks.measure import Deadline, synchronizer
from benchmarks.report import markdown_table
from opteq.configs import read_config
from opteq.data.folder import ImageFolder
from opteq.layer import EquilibriumLayer, solve_log
from opteq.maps.optequnit import OptEqUnit
from opteq.models.classifier import ImageClassifier
from opteq.models.parts import build, complete
from opteq.operators.conv import Conv2d

PRESET = "cifar10-small"
_BATCHES_BEFORE_COUNTING = 10


@dataclass(frozen=True)
class Score:
    """How fast one network trains.

    Attributes:
        images_per_second: of training steps alone.
        images_per_second_loaded: with reading and augmenting the images.
        evaluations: of the equilibrium maps forward and backward on the last batch, None without one.
        loss: of its last batch, a sign that it learns.
    """

    name: str
    parameters: int
    images_per_second: float
    images_per_second_loaded: float
    evaluations: tuple[int, int] | None
    loss: float


@dataclass(frozen=True)
class EpochResult:
    """All networks, on the same batches.

    Attributes:
        images: images of the epoch that were trained on within the time.
        epoch: images of a whole epoch.
    """

    images: int
    epoch: int
    scores: list[Score]


class Student:
    """A network in training and the seconds that this has taken."""

    def __init__(self, name: str, network: nn.Module, learning_rate: float, weight_decay: float) -> None:
        self.name, self.network = name, network.train()
        self.optimizer = torch.optim.AdamW(network.parameters(), learning_rate, weight_decay=weight_decay)
        self.seconds, self.loss = 0.0, float("nan")

    def train_on(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step, timed."""
        synchronize = synchronizer(images.device)
        synchronize()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.network(images), labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()
        synchronize()
        self.seconds += time.perf_counter() - start


class TorchDEQLayer(nn.Module):
    """The equilibrium of the same map, norm constraint included, solved and differentiated by torchdeq.

    Tolerances and most evaluations are those of the layer that it replaces.
    """

    counter: Counter | None = None

    def __init__(self, layer: EquilibriumLayer) -> None:
        super().__init__()
        self.map = layer.map
        limits = ((method.tol, method.max_steps) for method in (layer.solver, layer.gradient))  # type: ignore[union-attr]
        self.deq = torchdeq_anderson(*limits, ift=True)

    def forward(self, x: Tensor) -> Tensor:
        equation = self.map.bind(x)
        return run_torchdeq(self.deq, counted(equation, self.counter), equation.initial())  # type: ignore[arg-type]


class ExplicitLayer(nn.Module):
    """`z ← z + Vᵀ relu(U z + b)` once per block, with the convolutions of the equilibrium map."""

    def __init__(self, layer: EquilibriumLayer, blocks: int) -> None:
        super().__init__()
        assert isinstance(layer.map, OptEqUnit)
        W = layer.map.W
        assert isinstance(W, Conv2d)
        size, padding = W.kernel_size, W.kernel_size // 2
        up = [nn.Conv2d(W.in_channels, W.out_channels, size, padding=padding) for _ in range(blocks)]
        down = [
            nn.Conv2d(W.out_channels, W.in_channels, size, padding=padding, bias=False) for _ in range(blocks)
        ]
        # A deep stack without normalisation starts at the identity.
        for V in down:
            nn.init.zeros_(V.weight)
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

    def forward(self, z: Tensor) -> Tensor:
        for U, V in zip(self.up, self.down, strict=True):
            z = z + V(F.relu(U(z)))
        return z


def measure_epoch(root: str, device: torch.device, deadline: Deadline) -> EpochResult:
    """Train all networks side by side for one epoch or until the deadline.

    Every batch is given to every network, in rotating order, so that whatever else the machine does
    falls on all alike.

    Args:
        root: folder with `train/<class>/` and `test/<class>/` or `val/<class>/`.
        device: where to train.
        deadline: when to stop before the epoch is over.
    """
    config = read_config(PRESET)
    options = {k: v for k, v in config["data"]["init_args"].items() if k != "root"}
    data = ImageFolder(root, image_size=32, **options)
    data.setup("fit")
    loader = data.train_dataloader()
    images, labels = (t.to(device) for t in next(iter(loader)))

    torch.manual_seed(0)
    complete(config["model"]["network"], data.in_channels, len(data.class_names))
    network = build(config["model"]["network"]).to(device)
    rates = config["model"]["learning_rate"], config["model"]["weight_decay"]
    # The number of evaluations changes most in the first batches.
    trained = Student("", copy.deepcopy(network), *rates)
    for _ in range(_BATCHES_BEFORE_COUNTING):
        trained.train_on(images, labels)
    blocks = _evaluations(trained.network, images, labels)[0]
    students = [Student(name, n, *rates) for name, n in _networks(network, blocks).items()]
    for student in students:
        student.train_on(images, labels)
        student.seconds = 0.0

    seen, loading, mark = 0, 0.0, time.perf_counter()
    for number, batch in enumerate(loader):
        images, labels = (t.to(device) for t in batch)
        loading += time.perf_counter() - mark
        for position in range(len(students)):
            students[(position + number) % len(students)].train_on(images, labels)
        seen += len(images)
        if deadline.passed():
            break
        mark = time.perf_counter()
    scores = [_score(student, seen, loading, images, labels) for student in students]
    return EpochResult(seen, len(loader) * data.batch_size, scores)


def epoch_markdown(result: EpochResult) -> str:
    """The table of all networks."""
    ours = result.scores[0].images_per_second
    columns = (
        "network", "parameters", "images/s", "ours / it", "images/s with loading", "evaluations", "last loss",
    )  # fmt: skip
    rows = (
        (
            s.name,
            f"{s.parameters:,}",
            f"{s.images_per_second:.0f}",
            f"{ours / s.images_per_second:.2f}",
            f"{s.images_per_second_loaded:.0f}",
            "{} + {}".format(*s.evaluations) if s.evaluations else "–",
            f"{s.loss:.2f}",
        )
        for s in result.scores
    )
    part = f"{result.images:,} of the {result.epoch:,} images of an epoch"
    return f"Preset {PRESET}, {part}; evaluations on the last batch.\n\n{markdown_table(columns, rows)}"


def _networks(network: ImageClassifier, blocks: int) -> dict[str, nn.Module]:
    def with_middle(middle: Callable[[EquilibriumLayer], nn.Module]) -> nn.Module:
        other = copy.deepcopy(network)
        (layer,) = other.equilibrium_layers
        other.body = middle(layer).to(next(network.parameters()).device)
        return other

    return {
        "opteq": copy.deepcopy(network),
        "the same model on torchdeq": with_middle(TorchDEQLayer),
        "explicit, equal parameters": with_middle(lambda layer: ExplicitLayer(layer, 1)),
        # One block has the two convolutions of one evaluation.
        f"explicit, {2 * blocks} convolutions": with_middle(lambda layer: ExplicitLayer(layer, blocks)),
    }


def _score(student: Student, seen: int, loading: float, images: Tensor, labels: Tensor) -> Score:
    parameters = sum(p.numel() for p in student.network.parameters())
    alone, loaded = seen / student.seconds, seen / (student.seconds + loading)
    loss = student.loss
    evaluations = _evaluations(student.network, images, labels)
    return Score(student.name, parameters, alone, loaded, evaluations if any(evaluations) else None, loss)


def _evaluations(network: nn.Module, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """Evaluations of the map in the forward and products in the backward solves of one step."""
    peers = [module for module in network.modules() if isinstance(module, TorchDEQLayer)]
    for peer in peers:
        peer.counter = Counter()
    with solve_log(network) as log:
        loss = F.cross_entropy(network(images), labels)
        # One evaluation of each attaches the gradient and is no part of the solve.
        forward = log.forward.evaluations + sum(p.counter.evaluations - 1 for p in peers if p.counter)
        loss.backward()
        backward = log.adjoint.evaluations + sum(p.counter.products for p in peers if p.counter)
    for peer in peers:
        peer.counter = None
    return forward, backward
