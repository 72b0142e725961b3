"""Where Gaussian kernel maps with patches pay attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.equation import Equation
from opteq.maps.parallel import ParallelEquation
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from opteq.objectives.patches import Patches
from opteq.results import State, tensors_of


def patch_attention(equation: Equation, state: State) -> Tensor | None:
    """Weights `e^{-γd}` of the patches at a state, averaged over the groups of channels.

    Args:
        equation: one equation, or several in parallel.
        state: where to look, for example the equilibrium.

    Returns:
        `(batch, branches, h, w)`, one number per place of a patch; branches with fewer places are
        spread over those of the finest. None where there is a branch without patches.
    """
    branches = equation.branches if isinstance(equation, ParallelEquation) else (equation,)
    maps = []
    for branch, y in zip(branches, tensors_of(state), strict=True):
        similarity = branch.similarity if isinstance(branch, SimilarityEquation) else None
        if not isinstance(similarity, GaussianSimilarity) or not isinstance(similarity.patches, Patches):
            return None
        height, width = (n // similarity.patches.size for n in y.shape[2:])
        # Patches are ordered by place, then by group of channels.
        maps.append(similarity.attention(y).unflatten(1, (height, width, -1)).mean(3))
    finest = max((m.shape[1:] for m in maps), key=lambda size: size[0] * size[1])
    return torch.cat([F.interpolate(m[:, None], tuple(finest), mode="nearest") for m in maps], 1)
