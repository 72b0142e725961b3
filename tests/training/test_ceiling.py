import pytest
import torch
from lightning.pytorch import Callback

from opteq.errors import ConfigError
from opteq.training.ceiling import RisingCeiling
from tests.networks import unit_classifier
from tests.training.fitting import fit_eight_steps


class Watch(Callback):
    """Notes the ceilings that training steps and validation batches see."""

    def __init__(self, unit):
        self.unit, self.training, self.validation = unit, [], []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.training.append(self.unit.max_norm)

    def on_validation_batch_end(self, *args):
        self.validation.append(self.unit.max_norm)


def test_training_rises_to_the_maps_own_ceiling_and_validation_has_it():
    torch.manual_seed(0)
    network = unit_classifier(in_channels=1, max_norm=0.99)
    unit = network.equilibrium_layers[0].map
    watch = Watch(unit)
    fit_eight_steps(network, RisingCeiling(start=0.9, until=0.5), watch)
    # Of eight steps the first four: 1 - ζ goes from .1 to .01 by equal factors.
    expected = [1 - 0.1 * 0.1 ** min(1.0, step / 4) for step in range(8)]
    assert watch.training == pytest.approx(expected)
    assert set(watch.validation) == {0.99}
    assert unit.max_norm == 0.99


@pytest.mark.parametrize("max_norm", [0.9, 0.95])
def test_nothing_to_raise_is_said(max_norm):
    with pytest.raises(ConfigError, match=r"no map has a `max_norm` between 0.95 and 1"):
        fit_eight_steps(unit_classifier(in_channels=1, max_norm=max_norm), RisingCeiling(start=0.95))


@pytest.mark.parametrize("options", [{"start": 1.0}, {"until": 0.0}, {"until": 1.1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="start"):
        RisingCeiling(**options)
