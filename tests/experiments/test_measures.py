"""What is measured of a trained network, with a clock and files made up."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opteq.data.base import ImageDataModule
from opteq.data.connected import ConnectedPixels, mazes
from opteq.data.digits import Digits
from opteq.data.folder import ImageFolder
from opteq.data.images import ArrayImages
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError
from opteq.evaluation.branchstudy import relations
from opteq.evaluation.corruptions import CORRUPTIONS, corrupted_accuracy
from opteq.experiments import measures
from opteq.experiments.measures import (
    attacked,
    branch_relations,
    corruptions,
    inside,
    larger_mazes,
    perturbed,
    relative_residual,
    subclasses,
    top_five,
    training_loss,
)
from opteq.models.bodies import Coupled
from opteq.solvers.anderson import Anderson
from tests.networks import branch_classifier, unit_classifier


@pytest.fixture(scope="module")
def digits():
    data = Digits(batch_size=16)
    data.setup("test")
    return data


class Red(nn.Module):
    """Says that a pixel is connected where the one to its left is red."""

    def forward(self, images):
        red = (images[:, 0] > 0) & (images[:, 1] < 0)
        answer = nn.functional.pad(red[:, :, :-1], (1, 0)).float()
        return torch.stack([0.5 - answer, answer - 0.5], 1)


def test_larger_mazes_have_the_mean_accuracy_of_their_classes():
    scores = larger_mazes(Red(), ConnectedPixels(size=8))
    for size in (32, 48):
        images, masks = mazes(100, size, 0.62, 2)
        red = ((images[:, 0] == 255) & (images[:, 1] == 0)).numpy()
        found = np.roll(red, 1, axis=2)
        found[:, :, 0] = False
        masks = masks.numpy()
        right = [(found == label)[masks == label].mean() for label in (False, True)]
        assert scores[f"mAcc_{size}"] == pytest.approx(np.mean(right), rel=1e-5)
    with pytest.raises(ConfigError, match="Expected ConnectedPixels"):
        larger_mazes(Red(), Digits())


NETWORKS = {
    "unit": lambda solver: unit_classifier(1, solver=solver),
    "branches": lambda solver: branch_classifier(
        Coupled, 1, channels=4, hidden=[4, 4], widths=[4], solver=solver
    ),
    # These iterate on y and give z = W y.
    "kernel branches": lambda solver: branch_classifier(
        Coupled, 1, channels=4, hidden=[5, 6], widths=[4], kernel="sigmoid", max_norm=0.7, solver=solver
    ),
}


@pytest.mark.spec("R7.1")
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_the_residual_is_that_of_the_map_at_the_state_of_the_layer(digits, make):
    torch.manual_seed(0)
    network = make(Anderson(tol=1e-2)).eval()
    (layer,) = network.equilibrium_layers
    images, _ = next(iter(digits.test_dataloader()))
    with torch.no_grad():
        c = network.stem(images)
        z = layer.solve(c).state
        image = layer.map.bind(c)(z)
    pairs = list(zip(z, image, strict=True)) if isinstance(z, tuple) else [(z, image)]
    change = sum((f - v).flatten(1).square().sum(1) for v, f in pairs).sqrt()
    size = sum(f.flatten(1).square().sum(1) for _, f in pairs).sqrt()
    residual = relative_residual(network, digits)["residual"]
    assert residual == pytest.approx(float((change / size).mean()), rel=1e-4)
    assert 0 < residual < 1e-2


@pytest.mark.spec("R7.9")
def test_what_is_inside_agrees_with_plain_iterations_and_a_dense_matrix(digits):
    torch.manual_seed(0)
    network = unit_classifier(1, max_norm=0.9, solver=Anderson(tol=1e-4)).eval()
    (layer,) = network.equilibrium_layers
    scores = inside(network, digits)
    hits, total = {1: 0, 3: 0, 20: 0}, 0
    with torch.no_grad():
        for images, labels in digits.test_dataloader():
            evaluate = layer.map.bind(network.stem(images))
            z, total = torch.zeros_like(layer(network.stem(images))), total + len(labels)
            for step in range(1, 21):
                z = evaluate(z)
                if step in hits:
                    hits[step] += int((network.head(z).argmax(1) == labels).sum())
        basis = torch.eye(4 * 64).view(-1, 4, 8, 8)
        dense = layer.map.W.bind((4, 8, 8))(basis).flatten(1)
    assert {k: scores[f"accuracy_{k}"] * total for k in hits} == pytest.approx(hits)
    ceiling = min(1.0, 0.9 / float(torch.linalg.matrix_norm(dense, 2)))
    assert scores["largest_norm"] == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)) * ceiling, rel=1e-3
    )
    assert 0 < scores["residual_20"] < 0.1
    assert "beta_max" not in scores
    assert "smallest_alpha" not in scores


def test_a_network_without_equilibria_has_nothing_inside(digits):
    assert inside(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits) == {}


class Brightness(nn.Module):
    """Says the second class where the mean pixel is above a half."""

    def __init__(self, normalization):
        super().__init__()
        self.mean, self.std = normalization.mean[0], normalization.std[0]

    def forward(self, images):
        bright = images.flatten(1).mean(1) * self.std + self.mean - 0.5
        return torch.stack([-bright, bright], 1)


class Shades(ImageDataModule):
    """Flat grey images, in the order of their classes: 0 below a half, 1 above it."""

    all_classes = ("dark", "bright")
    in_channels = 1
    normalization = Normalization((0.4,), (0.3,))

    def __init__(self, batch_size, image_size=4, every=1):
        super().__init__(batch_size)
        self.image_size, self.every = image_size, every

    def read(self, split):
        shades, size = torch.arange(0, 256, self.every, dtype=torch.uint8), self.image_size
        pixels = shades.view(-1, 1, 1, 1).expand(-1, 1, size, size).contiguous()
        return ArrayImages(pixels, (shades > 127).long())


@pytest.mark.spec("R7.4")
def test_an_attack_wins_where_the_brightness_is_within_its_reach():
    data = Shades(batch_size=100)
    data.setup("fit")
    scores = attacked(Brightness(data.normalization), data)
    shades = np.arange(256) / 255
    beyond = np.abs(shades - 0.5) > 8 / 255
    # Three steps of a quarter of ε do not reach its edge, from a start that noise leaves at the shade.
    assert scores["pgd_20"] == pytest.approx(beyond.mean(), abs=2 / 256)
    assert scores["pgd_3"] >= scores["pgd_20"]
    assert set(scores) == {"pgd_3", "pgd_5", "pgd_10", "pgd_20"}


def test_the_training_loss_is_the_mean_cross_entropy_of_all_images():
    data = Shades(batch_size=300)
    data.setup("fit")
    network = Brightness(data.normalization)
    train = data.train_dataloader().dataset
    bright = train.images[:, 0, 0, 0].double().numpy() / 255 - 0.5
    margins = np.where(train.labels.numpy() == 1, 2 * bright, -2 * bright)
    assert training_loss(network, data)["train_loss"] == pytest.approx(
        np.log1p(np.exp(-margins)).mean(), rel=1e-5
    )


def test_a_class_among_the_five_likeliest_counts(digits):
    class Order(nn.Module):
        """Ranks the classes 0, 1, 2, … whatever the image is."""

        def forward(self, images):
            return -torch.arange(10.0).expand(len(images), 10)

    labels = torch.cat([labels for _, labels in digits.test_dataloader()])
    assert top_five(Order(), digits)["test_accuracy_top5"] == pytest.approx(
        float((labels < 5).double().mean())
    )


def test_perturbed_features_of_size_zero_are_the_features(digits):
    torch.manual_seed(0)
    network = branch_classifier(Coupled, 1, channels=4, hidden=[4, 4], widths=[4]).eval()
    scores = perturbed(network, digits)
    images, labels = (torch.cat(parts) for parts in zip(*digits.test_dataloader(), strict=True))
    chosen = np.floor(np.arange(256) * len(labels) / 256).astype(int)
    with torch.no_grad():
        accuracy = float((network(images[chosen]).argmax(1) == labels[chosen]).double().mean())
    for direction in ("reconstructed", "uniform", "binomial"):
        assert scores[f"{direction}_0"] == pytest.approx(accuracy, abs=1e-9)
        assert {f"{direction}_0.1", f"{direction}_0.3"} <= scores.keys()


def test_relations_of_branches_are_those_of_images_of_all_classes(digits, monkeypatch):
    images, labels = (torch.cat(parts) for parts in zip(*digits.test_dataloader(), strict=True))
    order = labels.argsort(stable=True)
    in_order = DataLoader(TensorDataset(images[order], labels[order]), batch_size=50)
    monkeypatch.setattr(digits, "test_dataloader", lambda: in_order)
    seen = []

    def noted(network, images):
        seen.append(images)
        return relations(network, images)

    monkeypatch.setattr(measures, "relations", noted)
    network = branch_classifier(Coupled, 1, channels=4, hidden=[4, 4], widths=[4]).eval()
    branch_relations(network, digits)
    (found,) = seen
    assert len(found) == 100
    classes = [labels[(images == image).flatten(1).all(1)][0].item() for image in found]
    assert np.bincount(classes, minlength=10).min() >= 8


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Grey squares of the brightness of their sub-class, five of each."""
    root = tmp_path_factory.mktemp("animals")
    for brightness, name in enumerate(("cat.lion", "cat.lynx", "cat.puma", "dog.fox", "dog.wolf")):
        for split in ("train", "test"):
            (root / split / name).mkdir(parents=True)
            for i in range(5):
                pixels = np.full((4, 4, 3), 50 * brightness, dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return str(root)


def brightness(images, data):
    """The number of the sub-class in an image."""
    pixels = images[:, 0, 0, 0] * data.normalization.std[0] + data.normalization.mean[0]
    return (pixels * 255 / 50).round().long()


@pytest.mark.spec("R7.5")
def test_sub_classes_that_are_left_out_keep_the_label_of_their_super_class(animals):
    data = ImageFolder(
        animals, 4, batch_size=20, classes=["dog.wolf", "cat.lion", "cat.puma"], superclasses=True,
        val_fraction=0.4,
    )  # fmt: skip
    data.setup("fit")
    data.setup("test")
    assert data.class_names == ("dog", "cat")
    expected = {"train": {0, 2, 4}, "val": {0, 2, 4}, "test": {0, 2, 4}, "unseen": {1, 3}}
    for name, wanted in expected.items():
        images, labels = next(iter(getattr(data, f"{name}_dataloader")()))
        found = brightness(images, data)
        assert set(found.tolist()) == wanted
        assert torch.equal(labels == 0, found >= 3)


@pytest.mark.spec("R7.5")
def test_accuracies_on_known_and_unseen_sub_classes(animals):
    data = ImageFolder(animals, 4, classes=["cat.lion", "cat.puma", "dog.wolf"], superclasses=True)
    data.setup("test")

    class Network(nn.Module):
        """Right about all but wolves and lynxes."""

        def forward(self, x):
            kind = brightness(x, data)
            return nn.functional.one_hot(((kind == 3) | (kind == 1)).long(), 2).float()

    scores = subclasses(Network(), data)
    assert scores == pytest.approx({"known_accuracy": 2 / 3, "unseen_accuracy": 1 / 2})


def test_super_classes_that_cannot_be_told_are_named(animals):
    data = ImageFolder(animals, 4, classes=["cat.lion", "cat.puma"], superclasses=True)
    data.setup("test")
    with pytest.raises(ConfigError, match="a sub-class of every super-class, but not of dog"):
        data.unseen_dataloader()
    with pytest.raises(ConfigError, match=r"names SUPER\.SUB for `superclasses`, got '0'"):
        Digits(superclasses=True).setup("test")
    with pytest.raises(ConfigError, match="Expected `superclasses: true`"):
        subclasses(nn.Identity(), Digits())


@pytest.mark.spec("R7.3")
def test_accuracy_under_corruptions_is_the_mean_over_all_of_them():
    torch.manual_seed(0)
    data = Shades(batch_size=20, image_size=32, every=8)
    data.setup("fit")
    network = Brightness(data.normalization)
    scores = corruptions(network, data)
    found = corrupted_accuracy(network, data.test_dataloader(), data.normalization)
    assert [scores[name] for name in CORRUPTIONS] == pytest.approx([np.mean(found[n]) for n in CORRUPTIONS])
    assert scores["corrupted_accuracy"] == pytest.approx(np.mean(list(found.values())))
    # Noise leaves the mean where it is, brightness moves it across the half.
    assert scores["gaussian_noise"] > 0.95
    assert scores["brightness"] < 0.95
