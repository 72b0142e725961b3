import pytest
import torch
from lightning.pytorch import Callback

from opteq import Implicit, Unrolled
from opteq.errors import ConfigError
from opteq.training.warmup import UnrolledWarmup
from tests.networks import unit_classifier
from tests.training.fitting import fit_eight_steps


class Watch(Callback):
    """Notes the gradient methods that training steps and validation batches see."""

    def __init__(self, layer):
        self.layer, self.training, self.validation = layer, [], []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.training.append(self.layer.gradient)

    def on_validation_batch_end(self, *args):
        self.validation.append(self.layer.gradient)


@pytest.mark.parametrize("steps", [5, 0.6])
def test_the_first_steps_are_unrolled_and_validation_solves(steps):
    torch.manual_seed(0)
    own = Implicit(1e-4)
    network = unit_classifier(in_channels=1, gradient=own)
    (layer,) = network.equilibrium_layers
    watch = Watch(layer)
    fit_eight_steps(network, UnrolledWarmup(steps, iterations=3), watch)
    assert watch.training == [Unrolled(3, error=1e-4)] * 5 + [own] * 3
    assert set(watch.validation) == {own}
    assert layer.gradient is own


@pytest.mark.parametrize("options", [{"steps": 0}, {"iterations": 0}, {"steps": 1.5}, {"steps": -0.5}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        UnrolledWarmup(**options)
