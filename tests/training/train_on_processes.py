"""Trains small networks on a number of processes; run by `test_ddp.py`.

Arguments: number of processes, batch size of each, file for the results.
"""

import os
import sys

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.distributed import is_initialized
from torch.utils.data import DistributedSampler

import opteq
from opteq.data.digits import Digits
from opteq.evaluation.record import evaluate
from opteq.training.meter import TrainingMeter
from opteq.training.module import ClassifierModule

SIZES = (15, 16, 17, 26)
"""Of the training set; none of the other sets has an even share for every process either."""


class OrderedDigits(Digits):
    """A few images in a fixed order, dealt out to the processes in turn."""

    def __init__(self, batch_size, size):
        super().__init__(batch_size)
        self.size = size

    def setup(self, stage):
        super().setup("fit")
        super().setup("test")
        self._train = self._train.subset(torch.arange(self.size))
        self._val = self._val.subset(torch.arange(2 * self.size - 15))
        self._test = self._test.subset(torch.arange(self.size + 4))

    def train_dataloader(self):
        images = self._loaded(self._train)
        in_turn = DistributedSampler(images, shuffle=False) if is_initialized() else None
        return self._loader(images, sampler=in_turn)


def make_network():
    # Without batch norm, whose statistics over a batch differ from those over its halves.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        opteq.EquilibriumLayer(
            opteq.OptEqUnit(opteq.Conv2d(4, 6, 3), opteq.Conv2d(4, 6, 3)),
            opteq.Anderson(tol=1e-10, max_steps=200),
            opteq.Implicit(tol=1e-10, max_steps=200),
            "raise",
        ),
        nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )


def train(processes, batch_size, size, average):
    """Weights and metrics of a training, and what it scores on the test set."""
    torch.manual_seed(0)
    weights = [1.0 + label / 4 for label in range(10)]
    module = ClassifierModule(
        make_network(),
        learning_rate=0.01,
        schedule="constant",
        weight_decay=1e-3,
        label_smoothing=0.1,
        class_weights=weights,
    )
    meter = TrainingMeter()
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        precision="64-true",
        max_epochs=2,
        logger=False,
        callbacks=[meter, *([EMAWeightAveraging(decay=0.8)] if average else [])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = OrderedDigits(batch_size, size)
    trainer.fit(module, datamodule=data)
    metrics = dict(trainer.callback_metrics)
    metrics |= trainer.test(module, datamodule=data, verbose=False)[0]
    scores = {name: float(value) for name, value in metrics.items()}
    # What a report is drawn from, by the first process alone.
    record = evaluate(
        module.network, data.test_dataloader(), data.class_names, data.normalization, torch.device("cpu")
    )
    scores |= {"calibration_error": record.reliability.error, "images": meter.images}
    return {"weights": module.network.state_dict(), "metrics": scores}


def main(processes, batch_size, path):
    found = {size: train(int(processes), int(batch_size), size, size % 2 == 1) for size in SIZES}
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        torch.save(found, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
