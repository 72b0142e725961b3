"""Optimization-induced equilibrium models for PyTorch."""

from opteq.gradients.implicit import Implicit
from opteq.gradients.onestep import OneStep
from opteq.gradients.phantom import Phantom
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer, solve_log
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqUnit
from opteq.objectives.patches import Patches
from opteq.operators.compose import Compose, DepthwiseSeparableConv2d
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.operators.resample import AveragePool
from opteq.solvers.anderson import Anderson
from opteq.solvers.broyden import Broyden
from opteq.solvers.nesterov import Nesterov
from opteq.solvers.picard import Picard

__all__ = [
    "Anderson",
    "AveragePool",
    "Broyden",
    "Compose",
    "Conv2d",
    "Dense",
    "DepthwiseSeparableConv2d",
    "EquilibriumLayer",
    "GaussianMap",
    "Implicit",
    "Nesterov",
    "OneStep",
    "OptEqUnit",
    "Patches",
    "Phantom",
    "Picard",
    "Unrolled",
    "solve_log",
]

__version__ = "0.1.0"
