"""What rivals are compared with: their iteration, differentiated through."""

import torch

from opteq import EquilibriumLayer


def assert_equals_unrolled(layer: EquilibriumLayer, step, start, x, steps=200, atol=1e-9):
    """The layer's equilibrium at `x`, and gradients, against `steps` times `z ← step(z)`.

    Args:
        layer: that is solved to the last digits.
        step: a function of the state, in the graph of `x` and of the layer's parameters.
        start: the first state, a tuple of tensors.
        x: the features.
        steps: how many.
        atol: absolute tolerance.
    """
    z = start
    for _ in range(steps):
        z = step(z)
    solved = layer(x)
    solved = (solved,) if isinstance(solved, torch.Tensor) else solved
    targets = (x, *layer.parameters())
    torch.manual_seed(1)
    weights = [torch.randn_like(t) for t in z]
    gradients = []
    for state in (solved, z):
        loss = sum((t * w).sum() for t, w in zip(state, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, targets))
    for a, b in zip(solved, z, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)
    assert all(g.norm() > 0 for g in gradients[1])
