import inspect
from importlib import import_module

import pytest

from opteq.configs import presets, read_config
from opteq.data import fashion_mnist
from opteq.data.cifar import CIFAR10, CIFAR100
from opteq.data.folder import ImageFolder
from opteq.data.places import PLACES, Place
from opteq.errors import ConfigError


@pytest.mark.parametrize("name", PLACES)
def test_the_root_is_that_of_the_class(name):
    module, _, cls = name.rpartition(".")
    default = inspect.signature(getattr(import_module(module), cls)).parameters["root"].default
    assert PLACES[name].root == (None if default is inspect.Parameter.empty else default)


@pytest.mark.parametrize("module", [CIFAR10, CIFAR100])
def test_folder_and_address_are_those_of_torchvision(module):
    assert module.place.inside == (module.dataset.base_folder,)
    assert module.dataset.url in module.place.advice
    assert module.place.lacking.startswith(f"{module.__name__} ")


@pytest.mark.parametrize("name", PLACES)
def test_a_set_that_is_not_there_is_told_of_as_where_it_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "none")
    module, _, cls = name.rpartition(".")
    size = {"image_size": (8, 8)} if cls == "SegmentationFolder" else {}
    data = getattr(import_module(module), cls)(root=str(tmp_path), **size)

    def read():
        data.prepare_data()
        data.setup("fit")

    with pytest.raises(ConfigError) as refused:
        read()
    assert str(refused.value) == PLACES[name].complaint(str(tmp_path))


def photographs(folder, classes):
    """Folders of classes in a folder, one with a file, beside what is no class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        (folder / name / "1.JPG").touch()
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").touch()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.png").touch()
    return str(folder)


def test_classes_without_train_and_test_are_named_with_what_to_do(tmp_path):
    place = PLACES["opteq.data.folder.ImageFolder"]
    root = photographs(tmp_path / "photos", ["cat", "dog"])
    assert place.complaint(root) == (
        f"{root} holds the class folders cat, dog itself, where train and test are expected; give"
        f" --data.test_fraction 0.2 to test on a fifth of their images, or move them into {root}/train, and"
        f" those to test on into {root}/test/CLASS."
    )
    with pytest.raises(ConfigError, match="cat, dog itself"):
        ImageFolder(root).setup("fit")
    assert "cat0, cat1, cat2, cat3, cat4 and 2 more itself" in place.complaint(
        photographs(tmp_path / "many", [f"cat{i}" for i in range(7)])
    )
    train = photographs(tmp_path / "split" / "train", ["cat", "dog"])
    assert place.complaint(train).endswith("; name the folder above it with --data.root.")
    # There the classes are where they belong; what is missing is another folder.
    whole = str(tmp_path / "split")
    photographs(tmp_path / "split" / "more", ["a"])
    assert "val), but nowhere does not exist" in place.complaint(whole, "nowhere")


@pytest.mark.parametrize("there", ["a", "b/c"])
def test_one_of_several_is_enough(tmp_path, there):
    place = Place(None, ("a", "b/c"), "There is no {missing}.", "Look into {root}.")
    assert not place.holds(str(tmp_path))
    assert place.complaint("r") == "There is no r/a. Look into r."
    (tmp_path / there).mkdir(parents=True)
    assert place.holds(str(tmp_path))


def test_the_data_of_every_preset_is_known():
    own = {"opteq.data.digits.Digits", "opteq.data.connected.ConnectedPixels"}
    assert {read_config(preset.name)["data"]["class_path"] for preset in presets()} <= own | set(PLACES)
