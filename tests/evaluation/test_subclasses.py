from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from opteq.data.base import ImageDataModule
from opteq.data.cifar import CIFAR100
from opteq.data.images import ArrayImages
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError
from opteq.evaluation.subclasses import subclass_scores

NAMES = ("cat.lion", "cat.puma", "cat.tiger", "dog.fox", "dog.wolf")
# Two images of each of the first four, one of the last.
SUBCLASSES = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4])


class Animals(ImageDataModule):
    in_channels, image_size = 1, 1
    normalization = Normalization((0.0,), (1.0,))

    def read(self, split):
        self.all_classes = NAMES
        return (
            None if split == "val" else ArrayImages(SUBCLASSES.byte().view(-1, 1, 1, 1), SUBCLASSES.clone())
        )


class Answers(nn.Module):
    """Takes lions, foxes and wolves for dogs, the others for cats; a pixel holds the sub-class."""

    def forward(self, x):
        dog = torch.isin((x[:, 0, 0, 0] * 255).round(), torch.tensor([0.0, 3.0, 4.0]))
        return torch.stack([~dog, dog], 1).float()


def prepared(**options):
    data = Animals(superclasses=True, val_fraction=0.3, **options)
    data.setup("test")
    return data


@pytest.mark.spec("R7.5")
@pytest.mark.parametrize(("fold", "left_out"), [(0, ["cat.lion", "dog.fox"]), (1, ["cat.puma", "dog.wolf"])])
def test_a_fold_leaves_one_of_each_super_class_out(fold, left_out):
    data = prepared(fold=fold)
    kept = [name for name in NAMES if name not in left_out]
    assert list(data.kept_classes) == kept
    assert data.class_names == ("cat", "dog")
    seen = torch.cat([(x * 255).round().long().flatten() for x, _ in data.test_dataloader()])
    assert {NAMES[i] for i in seen.tolist()} == set(kept)
    unseen = [(x.mul(255).round().long().flatten(), y) for x, y in data.unseen_dataloader()]
    assert {(NAMES[i], int(y)) for x, ys in unseen for i, y in zip(x.tolist(), ys, strict=True)} == {
        (name, int(name.startswith("dog"))) for name in left_out
    }
    same = prepared(classes=kept)
    assert same.kept_classes == data.kept_classes
    # All folds together leave every sub-class out that has a fold.
    data.setup("fit")
    trained = torch.cat([(x * 255).round().long().flatten() for x, _ in data.val_dataloader()])
    assert not {NAMES[i] for i in trained.tolist()} & set(left_out)


@pytest.mark.spec("R7.5")
def test_accuracy_by_sub_class():
    found = subclass_scores(Answers(), prepared(fold=0))
    assert found.names == NAMES
    assert found.known.tolist() == [False, True, True, False, True]
    assert found.counts.tolist() == [2, 2, 2, 2, 1]
    assert found.accuracy.tolist() == [0, 1, 1, 1, 1]
    assert found.known_accuracy == 1
    assert found.unknown_accuracy == 0.5
    # By images, not by sub-classes: of the three that fold 1 leaves out none is wrong, of the others a third.
    found = subclass_scores(Answers(), prepared(fold=1))
    assert found.unknown_accuracy == 1
    assert found.known_accuracy == pytest.approx(4 / 6)


def test_folds_that_there_are_not_are_refused():
    with pytest.raises(ConfigError, match="got 2 with 2 of dog"):
        prepared(fold=2)
    for options in ({"fold": 0, "classes": list(NAMES)}, {"fold": -1}):
        with pytest.raises(ConfigError, match="in place of `classes`"):
            Animals(superclasses=True, **options)
    with pytest.raises(ConfigError, match="with `superclasses: true`"):
        Animals(fold=0)
    with pytest.raises(ConfigError, match=r"--data\.fold 0"):
        subclass_scores(Answers(), prepared())


# The fine classes of CIFAR-100, in the order of their names, its super-classes, and the coarse labels that
# its files hold for the fine ones.
FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm"""
SUPERS = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things
large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals non-insect_invertebrates
people reptiles small_mammals trees vehicles_1 vehicles_2"""
COARSE = [
    *[4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7],
    *[6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10],
    *[16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16],
    *[12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13],
]


@pytest.mark.spec("R7.5")
def test_cifar_100_has_its_own_super_classes(monkeypatch):
    def small(root, train):
        return SimpleNamespace(
            classes=FINE.split(), data=np.zeros((100, 32, 32, 3), np.uint8), targets=list(range(100))
        )

    monkeypatch.setattr(CIFAR100, "dataset", staticmethod(small))
    data = CIFAR100(superclasses=True, fold=4)
    data.setup("test")
    assert data.all_classes == tuple(
        f"{SUPERS.split()[c]}.{name}" for name, c in zip(FINE.split(), COARSE, strict=True)
    )
    assert len(data.class_names) == 20
    assert len(data.kept_classes) == 80
    assert len(data.test_dataloader().dataset) == 80
    assert len(data.unseen_dataloader().dataset) == 20
    plain = CIFAR100()
    plain.setup("test")
    assert plain.class_names == tuple(FINE.split())
