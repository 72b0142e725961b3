"""The public names of `opteq`, which hands them on at their first use."""

import opteq.native as native
from opteq.gradients.implicit import Implicit
from opteq.gradients.onestep import OneStep
from opteq.gradients.phantom import Phantom
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer, solve_log
from opteq.maps.affine import AffineChange
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import GaussianMap
from opteq.maps.hidden import HiddenReadout
from opteq.maps.kernel import KernelMap
from opteq.maps.kernelbranches import KernelMOptEq
from opteq.maps.mixing import LinearMixing
from opteq.maps.multiblock import MultiBlockOptEq
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.own import SimilarityMap
from opteq.maps.parallel import Parallel
from opteq.maps.regularised import Regularised
from opteq.maps.skip import MoreauSkip
from opteq.maps.wide import WideOptEq
from opteq.models.converter import from_feedforward
from opteq.objectives.batch_regularisers import HSIC, Decorrelation, RandomFeatureHSIC
from opteq.objectives.checking import check_regulariser
from opteq.objectives.coupling import HeritageDiversity
from opteq.objectives.inner_product import LinearKernel, PolynomialKernel, SigmoidKernel
from opteq.objectives.patches import Patches
from opteq.objectives.regularisers import AbsoluteNorm, Incay, SquaredNorm
from opteq.operators.base import settle_norms
from opteq.operators.checking import check_operator
from opteq.operators.compose import Compose, DepthwiseSeparableConv2d
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.operators.norms.almost_orthogonal import AlmostOrthogonal
from opteq.operators.norms.ceiling import Ceiling
from opteq.operators.norms.orthogonal import Orthogonal
from opteq.operators.norms.shift_isometry import ShiftIsometry
from opteq.operators.norms.unconstrained import Unconstrained
from opteq.operators.norms.weight_normalised import WeightNormalised
from opteq.operators.resample import AveragePool
from opteq.operators.starts import GaussianStart, OrthogonalStart, UniformStart
from opteq.solvers.anderson import Anderson
from opteq.solvers.broyden import Broyden
from opteq.solvers.nesterov import Nesterov
from opteq.solvers.picard import Picard
from opteq.solvers.sam import SAM
from opteq.system.memory import keep_freed_memory
from opteq.theory.certificates import certify
from opteq.theory.robustness import robust_radius

__all__ = [
    "HSIC",
    "SAM",
    "AbsoluteNorm",
    "AffineChange",
    "AlmostOrthogonal",
    "Anderson",
    "AveragePool",
    "Broyden",
    "Ceiling",
    "Compose",
    "Conv2d",
    "Decorrelation",
    "DeepOptEq",
    "Dense",
    "DepthwiseSeparableConv2d",
    "EquilibriumLayer",
    "GaussianMap",
    "GaussianStart",
    "HeritageDiversity",
    "HiddenReadout",
    "Implicit",
    "Incay",
    "KernelMOptEq",
    "KernelMap",
    "LinearKernel",
    "LinearMixing",
    "MOptEq",
    "MoreauSkip",
    "MultiBlockOptEq",
    "Nesterov",
    "OneStep",
    "OptEqUnit",
    "Orthogonal",
    "OrthogonalStart",
    "Parallel",
    "Patches",
    "Phantom",
    "Picard",
    "PolynomialKernel",
    "RandomFeatureHSIC",
    "Regularised",
    "ShiftIsometry",
    "SigmoidKernel",
    "SimilarityMap",
    "SquaredNorm",
    "Unconstrained",
    "UniformStart",
    "Unrolled",
    "WeightNormalised",
    "WideOptEq",
    "certify",
    "check_operator",
    "check_regulariser",
    "from_feedforward",
    "keep_freed_memory",
    "native",
    "robust_radius",
    "settle_norms",
    "solve_log",
]
