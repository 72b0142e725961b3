import pytest
import torch
from lightning.pytorch import Callback

from opteq.errors import ConfigError
from opteq.gradients.implicit import Implicit
from opteq.solvers.anderson import Anderson
from opteq.training.tolerance import FollowingTolerance
from tests.networks import unit_classifier
from tests.training.fitting import fit_eight_steps


class Watch(Callback):
    """Notes the tolerances that training steps and validation batches see."""

    def __init__(self, layer):
        self.layer, self.training, self.validation = layer, [], []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.training.append((self.layer.solver.tol, self.layer.gradient.tol))

    def on_validation_batch_end(self, *args):
        self.validation.append((self.layer.solver.tol, self.layer.gradient.tol))


def test_training_tightens_to_the_layers_own_tolerances_and_validation_has_them():
    torch.manual_seed(0)
    solver, gradient = Anderson(tol=1e-3), Implicit(tol=1e-2)
    network = unit_classifier(in_channels=1, solver=solver, gradient=gradient)
    (layer,) = network.equilibrium_layers
    watch = Watch(layer)
    fit_eight_steps(network, FollowingTolerance(loosest=100.0, until=0.5), watch)
    # Eight steps, the last four of them at the layer's own tolerances; 0.5 is the ceiling.
    expected = [100 ** max(0.0, 1 - step / 4) for step in range(8)]
    assert [s for s, _ in watch.training] == pytest.approx([1e-3 * f for f in expected])
    assert [g for _, g in watch.training] == pytest.approx([min(1e-2 * f, 0.5) for f in expected])
    assert set(watch.validation) == {(1e-3, 1e-2)}
    assert (layer.solver, layer.gradient) == (solver, gradient)


@pytest.mark.parametrize("options", [{"loosest": 0.5}, {"until": 0.0}, {"until": 1.1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="loosest"):
        FollowingTolerance(**options)
