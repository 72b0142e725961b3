"""Trains a small network on a number of processes; run by `test_ddp.py`.

Arguments: number of processes, batch size of each, file for the results.
"""

import sys

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.distributed import is_initialized
from torch.utils.data import DistributedSampler

import opteq
from opteq.data.digits import Digits
from opteq.training.module import ClassifierModule


class OrderedDigits(Digits):
    """In a fixed order, dealt out to the processes in turn."""

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


def main(processes, batch_size, path):
    torch.manual_seed(0)
    module = ClassifierModule(make_network(), learning_rate=0.01, schedule="constant", weight_decay=1e-3)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(processes),
        strategy="ddp" if int(processes) > 1 else "auto",
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=OrderedDigits(batch_size=int(batch_size), train_limit=128))
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"weights": module.network.state_dict(), "metrics": metrics}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
