from types import SimpleNamespace

import pytest
import torch
from torch import nn

from opteq.layer import EquilibriumLayer
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.conv import Conv2d

MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
CLASSES = 7


def new_network():
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(6, 6, 3), Conv2d(6, 6, 3)))
    head = nn.Linear(6 * 36, CLASSES)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), layer, nn.BatchNorm2d(6), nn.Flatten(), head)


def new_data(network):
    """A test set of which a part is right, and its normalised images and labels as two tensors."""
    torch.manual_seed(1)
    images = (torch.rand(90, 3, 6, 6) - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[
        :, None, None
    ]
    labels = torch.randint(0, CLASSES, (90,))
    with torch.no_grad():
        labels[:40] = network.eval()(images[:40]).argmax(1)
    network.train()
    batches = list(zip(images.split(32), labels.split(32), strict=True))
    return SimpleNamespace(
        task="classification",
        images=images,
        labels=labels,
        class_names=["<b>", "$x$ --", "c", "d", "e", "f", "g"],
        normalization=(MEAN, DEVIATION),
        test_dataloader=lambda: batches,
    )


@pytest.fixture
def network():
    return new_network()


@pytest.fixture
def data(network):
    return new_data(network)
