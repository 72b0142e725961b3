import numpy as np
import pytest
import torch
from torch import nn

from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.gaussian import GaussianMap
from opteq.maps.hidden import HiddenReadout
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.regularised import Regularised
from opteq.objectives.regularisers import SquaredNorm
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.show.settings import Settings, changed, knobs
from opteq.solvers.anderson import Anderson


def unit(**options):
    return OptEqUnit(Dense(4, 6), Dense(3, 6), **options)


def network_of(map):
    return nn.Sequential(EquilibriumLayer(map, Anderson(tol=1e-5, max_steps=500))).eval()


def branches():
    return MOptEq([OptEqUnit(Conv2d(4, 6, 3), Conv2d(2, 6, 3), max_norm=0.8) for _ in range(2)])


class TestKnobs:
    def test_each_model_has_its_own(self):
        kernel = GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.3)
        for map, expected in [
            (unit(), {"strength": None}),
            (Regularised(unit(), SquaredNorm(), 0.2), {"strength": 0.2}),
            (kernel, {"width": 0.3, "strength": None}),
            (branches(), {"coupling": 0.01}),
            (HiddenReadout(Regularised(unit(), SquaredNorm(), 0.2)), {"strength": 0.2}),
            (HiddenReadout(branches()), {"coupling": 0.01}),
        ]:
            numbers, _ = knobs(network_of(map))
            assert {knob.name: knob.value for knob in numbers} == expected

    def test_a_regulariser_that_was_trained_can_be_taken_away(self):
        assert "none" in knobs(network_of(Regularised(unit(), SquaredNorm(), 0.2)))[1]
        assert "none" not in knobs(network_of(unit()))[1]
        assert knobs(network_of(branches()))[1] == []


class TestChanged:
    def test_what_is_read_is_read_from_the_regularised_equilibrium(self):
        torch.manual_seed(0)
        network, x = network_of(HiddenReadout(unit())), torch.ones(1, 3)
        read = changed(network, Settings(regulariser="absolute norm", strength=0.05))(x)
        map = network[0].map.map
        equation = map.bind(x)
        z = equation.initial()
        for _ in range(500):
            shrunk = z.sign() * (z.abs() - 0.05).clamp(min=0)
            z = equation(shrunk)
        torch.testing.assert_close(read, equation.hidden(shrunk), atol=1e-4, rtol=1e-4)
        assert (read - network(x)).abs().max() > 1e-3
        assert changed(network, Settings())[0].map is network[0].map

    def test_a_regulariser_is_in_the_equation_that_is_solved(self):
        torch.manual_seed(0)
        network, x = network_of(unit()), torch.ones(1, 3)
        z = changed(network, Settings(regulariser="absolute norm", strength=0.05))(x)[0].detach().numpy()
        map = network[0].map
        W = map.W.bind((4,), map.max_norm)(torch.eye(4)).T.detach().numpy()
        c = map.injection(x)[0].detach().numpy()
        shrunk = np.sign(z) * np.maximum(np.abs(z) - 0.05, 0)
        np.testing.assert_allclose(W.T @ np.maximum(W @ shrunk + c, 0), z, atol=1e-4)
        assert np.abs(z - network(x)[0].detach().numpy()).max() > 1e-3

    def test_the_network_itself_stays_as_it_is(self):
        network = network_of(branches())
        other = changed(network, Settings(coupling=0.05))
        assert other[0].map.coupling.weight == 0.05
        assert network[0].map.coupling.weight == 0.01

    def test_the_width_of_a_kernel(self):
        other = changed(network_of(GaussianMap(Dense(4, 6), Dense(3, 6))), Settings(width=2.0))
        assert other[0].map.gamma == 2.0

    def test_strength_and_absence_of_a_trained_regulariser(self):
        network = network_of(Regularised(unit(), SquaredNorm(), 0.2))
        stronger = changed(network, Settings(strength=0.7))[0].map
        assert (stronger.gamma, stronger.regulariser, stronger.form) == (0.7, SquaredNorm(), "gradient")
        assert isinstance(changed(network, Settings(regulariser="none"))[0].map, OptEqUnit)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (Settings(coupling=0.1), "no `coupling`"),
            (Settings(regulariser="entropy"), "no regulariser 'entropy'"),
            (Settings(strength=0.1), "choose a regulariser first"),
            (Settings(regulariser="squared norm", strength=-1.0), "positive"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, settings, words):
        with pytest.raises(ConfigError, match=words):
            changed(network_of(unit()), settings)
