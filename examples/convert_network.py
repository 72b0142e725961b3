"""Turn a feed-forward network into a deep equilibrium model with the same output.

python examples/convert_network.py
"""

import torch
from torch import nn

import opteq


def main() -> float:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()
    images = torch.rand(8, 3, 12, 12)

    model = opteq.from_feedforward(network)
    solution = model.equilibrium.solve(images)
    difference = (model(images) - network(images)).norm() / network(images).norm()
    print(f"equilibrium found in {solution.info.evaluations} evaluation of T")
    print(f"relative difference of the logits: {difference:.1e}")

    # Every layer of the network is a unit z ↦ Wᵀσ(W z + U x + b) of the model, and its activations are
    # a slot of the equilibrium's channels.
    for slot, unit in zip(model.slots, model.equilibrium.map.units[1:], strict=True):
        print(f"channels {slot.start} to {slot.stop - 1}: {unit.W.out_channels} with {unit.activation}")
    return difference.item()


if __name__ == "__main__":
    main()
