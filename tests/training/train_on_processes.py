"""Trains a small network on a number of processes; run by `test_ddp.py`.

Arguments: number of processes, batch size of each, gradient method, file for the results.
"""

import sys

import torch
from lightning.pytorch import Trainer
from torch import nn

import opteq
from opteq.data.digits import Digits
from opteq.training.module import ClassifierModule


class OrderedDigits(Digits):
    """In a fixed order, which a distributed sampler deals out in turn."""

    def train_dataloader(self):
        return self._loader(self._loaded(self._train))


def make_network(gradient):
    # Without batch norm, whose statistics over a batch differ from those over its halves.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        opteq.EquilibriumLayer(
            opteq.OptEqUnit(opteq.Conv2d(4, 6, 3), opteq.Conv2d(4, 6, 3)),
            None if isinstance(gradient, opteq.Unrolled) else opteq.Anderson(tol=1e-10, max_steps=200),
            gradient,
            "raise",
        ),
        nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )


def main(processes, batch_size, gradient, path):
    torch.manual_seed(0)
    gradients = {
        "implicit": opteq.Implicit(tol=1e-10, max_steps=200),
        "phantom": opteq.Phantom(),
        "unrolled": opteq.Unrolled(steps=10),
    }
    module = ClassifierModule(
        make_network(gradients[gradient]), learning_rate=0.05, schedule="constant", weight_decay=1e-3
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(processes),
        strategy="auto" if processes == "1" else "ddp",
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=OrderedDigits(batch_size=int(batch_size), train_limit=256))
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"weights": module.network.state_dict(), "metrics": metrics}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
