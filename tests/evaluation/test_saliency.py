import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

from opteq import Conv2d, EquilibriumLayer, OptEqUnit, Unrolled
from opteq.errors import ConfigError
from opteq.evaluation.saliency import grad_cam
from opteq.models.bodies import Coupled, Deep
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.stems import PooledStem
from tests.networks import branch_classifier

pytestmark = pytest.mark.spec("R7.6")


@pytest.fixture
def images():
    torch.manual_seed(0)
    return torch.randn(3, 3, 8, 12)


def enlarged(maps, size=(8, 12)):
    return F.interpolate(maps[:, None], size, mode="bilinear")[:, 0]


@pytest.mark.parametrize("gradient", [None, Unrolled(10)])
def test_behind_an_average_pool_the_weights_are_those_of_the_head(images, gradient):
    body = Deep(6, [5, 7, 4], gradient=gradient)
    network = ImageClassifier(PooledStem(3, 6, 2), body, Head(6, 10, norm=False))
    network.requires_grad_(False)
    classes = torch.tensor([4, 0, 9])
    # The average over h·w pixels makes the logit Σ_k weight_k mean(A_k): a_k = weight_k / (h w).
    features = network.eval().features(images)
    weights = network.head[-1].weight[classes] / (4 * 6)
    expected = enlarged(torch.einsum("bk,bkhw->bhw", weights, features)).relu()
    maps = grad_cam(network.train(), images, classes)
    torch.testing.assert_close(maps, expected)
    assert maps.max() > 0
    assert network.training


def test_branches_are_added_in_the_size_of_the_image(images):
    network = branch_classifier(Coupled, channels=4, hidden=[4, 4], widths=[4], downsamplings=1).eval()
    equilibria = tuple(z.detach().requires_grad_() for z in network.features(images))
    logits = network.head(equilibria)
    predicted = logits.argmax(1)
    gradients = torch.autograd.grad(logits[torch.arange(3), predicted].sum(), equilibria)
    expected = sum(
        enlarged((g.mean((2, 3))[:, :, None, None] * z).sum(1))
        for z, g in zip(equilibria, gradients, strict=True)
    )
    torch.testing.assert_close(grad_cam(network, images), expected.relu().detach(), rtol=1e-4, atol=1e-7)


def test_networks_without_an_equilibrium_show_their_last_features(images):
    torch.manual_seed(0)
    network = resnet18(num_classes=5).eval()
    images = F.interpolate(images, (64, 64))
    last = grad_cam(network, images)
    assert torch.equal(last, grad_cam(network, images, module=network.layer4))
    features = network.layer3(
        network.layer2(network.layer1(network.maxpool(F.relu(network.bn1(network.conv1(images))))))
    )
    features = features.detach().requires_grad_()
    logits = network.fc(network.avgpool(network.layer4(features)).flatten(1))
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), features)
    expected = enlarged((gradient.mean((2, 3))[:, :, None, None] * features).sum(1), (64, 64)).relu()
    maps = grad_cam(network, images, torch.tensor([2, 2, 2]), network.layer3)
    torch.testing.assert_close(maps, expected.detach())
    assert all(p.grad is None for p in network.parameters())


def test_a_map_lies_where_the_class_is_seen():
    """A network that looks at the left half alone, through an equilibrium."""
    torch.manual_seed(0)

    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = EquilibriumLayer(OptEqUnit(Conv2d(2, 3, 1), Conv2d(1, 3, 1)))

        def forward(self, x):
            left = self.layer(x * (torch.arange(8) < 4)).square().mean((1, 2, 3))
            return torch.stack([left, -left], 1)

    maps = grad_cam(Left(), torch.rand(2, 1, 8, 8), torch.tensor([0, 0]))
    assert maps[:, :, :3].mean() > 2 * maps[:, :, 5:].mean()


def test_without_features_there_is_nothing_to_show(images):
    network = nn.Sequential(nn.Flatten(), nn.Linear(288, 4))
    with pytest.raises(ConfigError, match="the network has none"):
        grad_cam(network, images)
    with pytest.raises(ConfigError, match="Linear gave none"):
        grad_cam(network, images, module=network[1])
