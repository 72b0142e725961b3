"""Training of a classifier of images or of their pixels: loss, optimizer, schedule and what is logged."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix

from opteq.data.facts import Facts
from opteq.data.scenes import IGNORED
from opteq.errors import ConfigError, OpteqError
from opteq.evaluation.attacks import PGD
from opteq.layer import solve_log
from opteq.models.classifier import ImageClassifier
from opteq.models.loading import expect_weights
from opteq.objectives.coupling import HeritageDiversity
from opteq.operators.base import settle_norms
from opteq.solvelog import SolveLog
from opteq.training.checkpoints import FILE
from opteq.training.optimizers import make_optimizer, take_options
from opteq.training.schedules import Schedule, learning_rate_factor
from opteq.training.shares import own_samples
from opteq.training.taskscores import SCORES, make_scores


class ClassifierModule(LightningModule):
    """Trains a network that maps images to logits with the cross entropy.

    For segmentation every pixel is classified, and those without a class are left out. Per epoch it logs the
    loss, the scores of `opteq.training.taskscores.make_scores`, and for all solves of equilibrium layers:
    mean number of steps, number of samples that did not reach their tolerance, and largest residual; in
    training also those of the adjoint.

    Args:
        network: Maps images, shape (batch, channels, height, width), to logits, shape (batch, classes), or
            (batch, classes, height, width) for segmentation.
        optimizer: `"sgd"` with Nesterov momentum 0.9, `"adamw"`, or what makes an optimizer of groups of
            parameters; in a configuration any class of optimizers, such as `torch.optim.RAdam` or
            `timm.optim.Lion`, with its options.
        learning_rate: Peak learning rate, of every optimizer.
        weight_decay: Weight decay of matrices and kernels, by every optimizer; biases and norms have none.
        schedule: Course of the learning rate, see `opteq.training.schedules`.
        warmup: Part of the training, from 0 to 1, over which the learning rate rises to its peak.
        milestones: Parts of the training after which the schedule `"step"` drops; None for its own.
        drop: By what factor it drops.
        label_smoothing: Share of the target that is spread over all classes.
        class_weights: What an image, or a pixel, of each class counts in the training loss, in the order of
            the labels; `"balanced"` for one over the share of the class among the training labels, divided by
            the number of classes. None counts all alike.
        adversary: Attack on the training images; the network is trained on what it makes of them
            (adversarial training, Madry et al. 2018). None trains on the images themselves.
        penalty: Coupling whose value at what the body of an `ImageClassifier` gives, a tuple of tensors, is
            added to the loss, `γ Σ(λD - H)` (the augmented loss of Li et al. 2022, §3.2, which prints the
            opposite sign and so would work against its own aim).
        penalty_weight: The `γ` of the penalty.
    """

    _weights: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        optimizer: Literal["sgd", "adamw"] | OptimizerCallable = "sgd",
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        schedule: Schedule = "cosine",
        warmup: float = 0.0,
        milestones: Sequence[float] | None = None,
        drop: float = 0.1,
        label_smoothing: float = 0.0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        adversary: PGD | None = None,
        penalty: HeritageDiversity | None = None,
        penalty_weight: float = 1e-3,
    ) -> None:
        super().__init__()
        if not learning_rate > 0 or not weight_decay >= 0:
            raise ConfigError(
                "Expected a positive `learning_rate` and no negative `weight_decay`, got"
                f" {learning_rate} and {weight_decay}."
            )
        if not 0 <= label_smoothing < 1:
            raise ConfigError(f"Expected `label_smoothing` in [0, 1), got {label_smoothing}.")
        self.network = network
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.schedule: Schedule = schedule
        self.warmup = warmup
        self.milestones = milestones
        self.drop = drop
        self.label_smoothing = label_smoothing
        self.class_weights: Literal["balanced"] | list[float] | None = class_weights
        self.adversary = adversary
        self.penalty = penalty
        self.penalty_weight = penalty_weight
        self._batch_scope = ExitStack()

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def setup(self, stage: str) -> None:
        self._facts = Facts(self.trainer.datamodule)  # pyright: ignore[reportAttributeAccessIssue]
        classes = len(self._facts.class_names)
        metrics = make_scores(self._facts.task, classes)
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")
        self.test_confusion = MulticlassConfusionMatrix(classes, ignore_index=IGNORED)
        if stage == "fit":
            self.register_buffer("_weights", self._class_weights(classes), persistent=False)

    def on_train_start(self) -> None:
        """Say at which rate a training goes on: the schedule of all its steps is entered in their midst."""
        for schedule in (config.scheduler for config in self.trainer.lr_scheduler_configs):
            # The average of the weights has a schedule of its own.
            if self.global_step and isinstance(schedule, LambdaLR):
                rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](self.global_step)
                rank_zero_info(
                    f"The learning rate goes on at {rate:.3g}, where the schedule {self.schedule} is after"
                    f" {self.global_step:,} of {int(self.trainer.estimated_stepping_batches):,} steps."
                )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        settle_norms(self.network)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """The loss of a batch, and how many images it is that of, those of all processes."""
        images, labels = batch
        own = own_samples(self.trainer.train_dataloader, batch_idx, len(images))
        # A process without samples of its own goes along, for the others wait for its gradients.
        images, labels = images[: own.stop or 1], labels[: own.stop or 1]
        if self.adversary is not None:
            images = self.adversary(self.network, images, labels, self._facts.normalization)
        # The scope of the log spans the backward pass, which Lightning runs before `on_train_batch_end`.
        self._solves = self._batch_scope.enter_context(solve_log(self.network))
        logits, penalty = self._answer(images)
        loss, samples = self._training_loss(logits, labels[own], penalty)
        if not loss.isfinite():
            raise OpteqError(
                f"The training loss became {loss.item()} in step {self.global_step}; "
                "lower --model.learning_rate or set --trainer.gradient_clip_val."
            )
        self._has_samples = own.stop > 0
        if self._has_samples:
            self._log_scores(self.train_metrics, logits, labels)
        self._log_mean("train_loss", loss, samples, prog_bar=True)
        return {"loss": loss, "images": samples}

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._batch_scope.close()
        if not self._has_samples:
            return
        self._log_solves("train", self._solves)
        adjoint = self._solves.adjoint
        if adjoint.samples:
            self._log_mean("train_adjoint_steps", adjoint.steps_mean, adjoint.samples)
            self._log_sum("train_adjoint_unconverged", adjoint.unconverged)

    def on_train_epoch_end(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        """Logs the scores; returns the logits of the samples that are this process's own, if any."""
        return self._evaluate(batch, batch_idx, self.trainer.val_dataloaders, "val", self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.trainer.test_dataloaders, "test", self.test_metrics)

    def on_test_end(self) -> None:
        # After the processes have met, and before the counts of the next test begin.
        self.confusion = self.test_confusion.compute().cpu().numpy()
        self.test_confusion.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._make_optimizer()
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ConfigError("A schedule needs an end: set --trainer.max_epochs or --trainer.max_steps.")
        factor = learning_rate_factor(self.schedule, int(total), self.warmup, self.milestones, self.drop)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check a checkpoint, and let the options of this training hold where it goes on from it.

        Raises:
            ConfigError, NonFiniteError: As `check_checkpoint`.
        """
        self.check_checkpoint(checkpoint)
        # A checkpoint of weights alone has none.
        if checkpoint.get("optimizer_states") and not take_options(checkpoint, self._make_optimizer()):
            rank_zero_info("The optimizer is of another kind than that of the checkpoint: it starts afresh.")

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another model, and useless ones, before any of them is loaded.

        Raises:
            ConfigError: Names, shapes or kinds of the weights differ.
            NonFiniteError: Weights are NaN or infinite.
        """
        expected = {name: tuple(weight.shape) for name, weight in self.state_dict().items()}
        found = {name: tuple(weight.shape) for name, weight in checkpoint["state_dict"].items()}
        different = sorted(name for name, _ in expected.items() ^ found.items())
        if different:
            name = different[0]
            raise ConfigError(
                f"The checkpoint is from another model: {len(set(different))} weights differ, among them "
                f"{name} ({found.get(name, 'missing')} in the checkpoint, "
                f"{expected.get(name, 'missing')} in the model); use the configuration it was trained with."
            )
        expect_weights(self, checkpoint["state_dict"], checkpoint.get(FILE, "The checkpoint"))

    @property
    def _headline(self) -> str:
        return f"val_{SCORES[self._facts.task][0]}"

    def _make_optimizer(self) -> Optimizer:
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [{**group, "lr": self.learning_rate} for group in groups]
        if self.optimizer == "sgd":
            return SGD(groups, momentum=0.9, nesterov=True)
        if self.optimizer == "adamw":
            return AdamW(groups)
        if isinstance(self.optimizer, str):
            raise ConfigError(
                f'Expected `optimizer` to be "sgd", "adamw" or a class, got {self.optimizer!r}.'
            )
        return make_optimizer(self.optimizer, groups)

    def _class_weights(self, classes: int) -> Tensor | None:
        if self.class_weights is None:
            return None
        if self.class_weights == "balanced":
            counts = self._facts.class_counts
            return counts.sum() / (classes * counts.clamp(min=1))
        weights = torch.as_tensor(self.class_weights, dtype=torch.float32)
        if len(weights) != classes or not (weights.isfinite() & (weights >= 0)).all() or not weights.any():
            raise ConfigError(
                f'Expected `class_weights` to be "balanced" or {classes} numbers of at least 0, one for each'
                f" class and not all 0, got {self.class_weights}."
            )
        return weights

    def _answer(self, images: Tensor) -> tuple[Tensor, Tensor | float]:
        """Logits of training images, and what is added to their loss."""
        if self.penalty is None:
            return self.network(images), 0.0
        network = self.network
        branches = network.features(images) if isinstance(network, ImageClassifier) else None
        if not isinstance(network, ImageClassifier) or not isinstance(branches, tuple):
            raise ConfigError(
                "Expected an ImageClassifier for `penalty`, with a body that gives a tuple of tensors, one"
                f" per branch, got {'a body that gives one' if branches is not None else type(network)}."
            )
        penalty = self.penalty.at(branches).value(branches).mean()
        return network.head(branches), self.penalty_weight * penalty

    def _training_loss(self, logits: Tensor, labels: Tensor, penalty: Tensor | float) -> tuple[Tensor, int]:
        """The loss of the samples of all processes, as far as it is from this one, and their number.

        It is the mean over all samples or pixels, weighted by their classes, whichever process has them. DDP
        averages the gradients of the processes, so that each takes its part times their number.
        """
        known = labels[labels != IGNORED]
        weight = labels.new_tensor(known.numel()) if self._weights is None else self._weights[known].sum()
        own = torch.stack([weight.float(), weight.new_tensor(len(labels), dtype=torch.float32)])
        whole = self.trainer.strategy.reduce(own.clone(), reduce_op="sum")
        loss = cross_entropy(
            logits[: len(labels)],
            labels,
            self._weights,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if not len(labels):
            loss = 0 * logits.sum()  # so that there are gradients
        loss = loss / whole[0] + penalty * own[1] / whole[1]
        return self.trainer.world_size * loss, int(whole[1])

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, loader: Any, stage: str, metrics: MetricCollection
    ) -> Tensor | None:
        own = own_samples(loader, batch_idx, len(batch[0]))
        if own.stop == 0:
            return None
        images, labels = (part[own] for part in batch)
        with solve_log(self.network) as solves:
            logits = self.network(images)
        self._log_scores(metrics, logits, labels)
        if stage == "test":
            self.test_confusion.update(logits, labels)
        known = int((labels != IGNORED).sum())
        loss = cross_entropy(logits, labels, reduction="sum") / max(known, 1)
        self._log_mean(f"{stage}_loss", loss, known)
        self._log_solves(stage, solves)
        return logits

    def _log_scores(self, metrics: MetricCollection, logits: Tensor, labels: Tensor) -> None:
        metrics.update(logits, labels)
        for name, metric in metrics.items(keep_base=False):
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=name == self._headline)

    def _log_solves(self, stage: str, solves: SolveLog) -> None:
        forward = solves.forward
        if forward.samples:
            self._log_mean(f"{stage}_solver_steps", forward.steps_mean, forward.samples)
            self._log_sum(f"{stage}_unconverged", forward.unconverged)
            self.log(
                f"{stage}_residual_max",
                forward.residual_max,
                on_step=False,
                on_epoch=True,
                reduce_fx="max",
                sync_dist=True,
                batch_size=1,
            )

    def _log_mean(self, name: str, value: Any, samples: int, prog_bar: bool = False) -> None:
        # Lightning averages the numbers of samples over the processes, and rounds whole ones down.
        weight: Any = float(samples)
        self.log(
            name, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=weight, prog_bar=prog_bar
        )

    def _log_sum(self, name: str, value: float) -> None:
        self.log(
            name, float(value), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1
        )
