import gzip
import hashlib
import os
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image
from sklearn.datasets import load_digits

from opteq.data import fashion_mnist
from opteq.data.cifar import CIFAR10, CIFAR100
from opteq.data.digits import Digits
from opteq.data.fashion_mnist import FashionMNIST
from opteq.data.finding import find_images
from opteq.data.folder import ImageFolder
from opteq.errors import ConfigError


def prepared(data):
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


def pixels_of(loader, normalization):
    """All images of a loader as bytes again, shape (n, channels, height, width), and their labels."""
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalization)
    return ((images * std + mean) * 255).round().to(torch.uint8), labels


def idx(array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def clothes(rng):
    """The four arrays of a small Fashion-MNIST by file name."""
    sizes = {"train": 40, "t10k": 20}
    return {
        f"{part}-{kind}": array
        for part, n in sizes.items()
        for kind, array in (
            ("images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)),
            ("labels-idx1-ubyte", (np.arange(n) % 10).astype(np.uint8)),
        )
    }


@pytest.fixture
def rng():
    return np.random.default_rng(0)


class TestDigits:
    def test_holds_all_of_scikit_learns_digits_once(self):
        data = prepared(Digits(batch_size=50))
        loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
        # The last training batch is incomplete and left out.
        assert [len(loader.dataset) for loader in loaders] == [1293, 144, 360]
        whole = torch.cat([loader.dataset.images for loader in loaders]).flatten(1)
        expected = np.round(load_digits().data * 255 / 16)
        assert sorted(map(tuple, whole.tolist())) == sorted(map(tuple, expected.tolist()))

    def test_splits_are_stratified_and_do_not_depend_on_the_seed(self):
        torch.manual_seed(1)
        first = prepared(Digits())
        torch.manual_seed(2)
        second = prepared(Digits())
        for loader in ("val_dataloader", "test_dataloader"):
            (x, y), (x2, y2) = (
                pixels_of(getattr(data, loader)(), data.normalization) for data in (first, second)
            )
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)
            counts = y.bincount()
            assert counts.max() - counts.min() <= 2

    def test_training_images_are_normalised_and_come_in_random_order(self):
        data = prepared(Digits())
        images, labels = (torch.cat(part) for part in zip(*data.train_dataloader(), strict=True))
        assert abs(images.mean()) < 0.02
        assert abs(images.std() - 1) < 0.02
        again = torch.cat([labels for _, labels in data.train_dataloader()])
        assert not torch.equal(labels, again)

    def test_augmentation_is_for_training_only(self):
        plain, augmented = prepared(Digits()), prepared(Digits(augmentation="crop"))
        for loader in ("val_dataloader", "test_dataloader"):
            x, x2 = (torch.cat([x for x, _ in getattr(d, loader)()]) for d in (plain, augmented))
            assert torch.equal(x, x2)
        torch.manual_seed(0)
        x = torch.cat([x for x, _ in plain.train_dataloader()])
        torch.manual_seed(0)
        assert not torch.equal(x, torch.cat([x for x, _ in augmented.train_dataloader()]))

    def test_workers_give_the_same_images(self):
        alone, helped = prepared(Digits()), prepared(Digits(num_workers=1))
        assert torch.equal(next(iter(alone.test_dataloader()))[0], next(iter(helped.test_dataloader()))[0])

    def test_train_limit_is_stratified(self):
        data = prepared(Digits(train_limit=100, batch_size=100))
        ((_, labels),) = data.train_dataloader()
        assert labels.bincount().tolist() == [10] * 10

    def test_balanced_batches_draw_every_class_equally_often(self):
        torch.manual_seed(0)
        data = Digits(batch_size=100, balanced=True)
        data.setup("fit")
        # Of 1293 images, all but 13 of the class 3 are of the class 7.
        data._train.labels = torch.full((1293,), 7)
        data._train.labels[:13] = 3
        assert data.class_counts.tolist() == [0, 0, 0, 13, 0, 0, 0, 1280, 0, 0]
        drawn = torch.cat([y for _, y in data.train_dataloader()])
        assert len(drawn) == 1200
        # Five standard deviations of a fair coin.
        assert abs((drawn == 3).float().mean() - 0.5) < 5 * 0.5 / 1200**0.5

    def test_nothing_is_read_twice(self, monkeypatch):
        data = prepared(Digits())
        monkeypatch.setattr(data, "read", lambda split: pytest.fail("read again"))
        prepared(data)

    @pytest.mark.parametrize(
        "options",
        [
            {"batch_size": 0},
            {"val_fraction": 0.0},
            {"val_fraction": 1.0},
            {"val_fraction": 1e-6},
            {"train_limit": 0},
            {"train_limit": 1294},
        ],
    )
    def test_refuses_options_out_of_range(self, options):
        (name,) = options
        with pytest.raises(ConfigError, match=name):
            prepared(Digits(**options))

    def test_asking_too_early_says_what_to_call(self):
        with pytest.raises(ConfigError, match="setup"):
            Digits().test_dataloader()


class TestFashionMNIST:
    def test_reads_the_idx_files(self, tmp_path, clothes):
        raw = tmp_path / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for name, array in clothes.items():
            (raw / name).write_bytes(idx(array))
        data = prepared(FashionMNIST(str(tmp_path), val_fraction=0.25))
        x, y = pixels_of(data.test_dataloader(), data.normalization)
        np.testing.assert_array_equal(x[:, 0].numpy(), clothes["t10k-images-idx3-ubyte"])
        np.testing.assert_array_equal(y.numpy(), clothes["t10k-labels-idx1-ubyte"])
        assert len(data.train_dataloader().dataset) == 30
        assert data.class_names[9] == "Ankle boot"

    def test_unpacks_debians_package(self, tmp_path, clothes, monkeypatch):
        debian = tmp_path / "debian"
        debian.mkdir()
        for name, array in clothes.items():
            (debian / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", debian)
        data = prepared(FashionMNIST(str(tmp_path / "data")))
        x, _ = pixels_of(data.test_dataloader(), data.normalization)
        np.testing.assert_array_equal(x[:, 0].numpy(), clothes["t10k-images-idx3-ubyte"])
        for name, array in clothes.items():
            assert (tmp_path / "data" / "FashionMNIST" / "raw" / name).read_bytes() == idx(array)

    def test_a_damaged_package_leaves_no_half_file(self, tmp_path, clothes, monkeypatch):
        for name, array in clothes.items():
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array))[:-9])
        monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path)
        with pytest.raises(ConfigError, match="reinstall dataset-fashion-mnist"):
            FashionMNIST(str(tmp_path / "data")).prepare_data()
        assert not list((tmp_path / "data").rglob("*ubyte*"))

    def test_missing_names_both_ways_to_get_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "none")
        with pytest.raises(ConfigError, match=r"dataset-fashion-mnist.*--data\.download true"):
            FashionMNIST(str(tmp_path)).prepare_data()

    def test_no_network_says_so(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise OSError("Network is unreachable")

        monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "none")
        monkeypatch.setattr(torchvision.datasets.FashionMNIST, "download", refuse)
        with pytest.raises(ConfigError, match="Could not download Fashion-MNIST"):
            FashionMNIST(str(tmp_path), download=True).prepare_data()

    def test_truncated_files_are_named(self, tmp_path, clothes):
        raw = tmp_path / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for name, array in clothes.items():
            (raw / name).write_bytes(idx(array)[:30])
        with pytest.raises(ConfigError, match="damaged"):
            prepared(FashionMNIST(str(tmp_path)))


def write_cifar(root, cls, rng, monkeypatch):
    """Writes a small set in CIFAR's format and makes torchvision expect its checksums."""
    folder = root / cls.base_folder
    folder.mkdir(parents=True)
    key = "labels" if cls is torchvision.datasets.CIFAR10 else "fine_labels"
    classes = 10 if cls is torchvision.datasets.CIFAR10 else 100
    arrays = {}

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    lists = {}
    for attribute in ("train_list", "test_list"):
        lists[attribute] = []
        for name, _ in getattr(cls, attribute):
            arrays[name] = rng.integers(0, 256, (classes, 3072), dtype=np.uint8)
            md5 = write(name, {"data": arrays[name], key: list(range(classes))})
            lists[attribute].append([name, md5])
        monkeypatch.setattr(cls, attribute, lists[attribute])
    names = [f"class {i}" for i in range(classes)]
    md5 = write(cls.meta["filename"], {cls.meta["key"]: names})
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": md5})
    return arrays


class TestCIFAR:
    @pytest.mark.parametrize("module", [CIFAR10, CIFAR100])
    def test_reads_the_batches(self, tmp_path, module, rng, monkeypatch):
        arrays = write_cifar(tmp_path, module.dataset, rng, monkeypatch)
        data = prepared(module(str(tmp_path), val_fraction=0.2))
        x, y = pixels_of(data.test_dataloader(), data.normalization)
        ((name, _),) = module.dataset.test_list
        np.testing.assert_array_equal(x.flatten(1).numpy(), arrays[name])
        assert y.tolist() == list(range(len(data.class_names)))
        assert data.class_names[3] == "class 3"
        total = sum(len(arrays[name]) for name, _ in module.dataset.train_list)
        assert len(data.train_dataloader().dataset) == 0.8 * total

    def test_missing_says_how_to_get_it(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cifar-10-python\.tar\.gz .*--data\.root"):
            prepared(CIFAR10(str(tmp_path)))

    def test_no_network_says_so(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise OSError("Network is unreachable")

        monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", refuse)
        with pytest.raises(ConfigError, match="Could not download CIFAR10"):
            prepared(CIFAR10(str(tmp_path), download=True))


@pytest.fixture
def folders(tmp_path, rng):
    """Writes `<part>/<class>/<i>.png` with the given number of images; returns the root."""

    def write(**parts):
        for part, (classes, number) in parts.items():
            for name in classes:
                folder = tmp_path / part / name
                folder.mkdir(parents=True)
                for i in range(number):
                    pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{i}.png")
        return str(tmp_path)

    return write


class TestImageFolder:
    def test_reads_classes_and_images(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        data = prepared(ImageFolder(root, image_size=8, val_fraction=0.2))
        assert data.class_names == ("a", "b")
        assert len(data.class_names) == 2
        assert [len(loader.dataset) for loader in (data.train_dataloader(), data.val_dataloader())] == [16, 4]
        x, y = pixels_of(data.test_dataloader(), data.normalization)
        expected = np.asarray(Image.open(tmp_path / "test" / "b" / "0.png")).transpose(2, 0, 1)
        np.testing.assert_array_equal(x[3].numpy(), expected)
        assert y.tolist() == [0, 0, 0, 1, 1, 1]

    def test_val_alone_is_the_test_set(self, folders):
        data = prepared(ImageFolder(folders(train=("ab", 10), val=("ab", 3)), image_size=8))
        assert len(data.test_dataloader().dataset) == 6
        assert len(data.val_dataloader().dataset) == 2

    @pytest.mark.parametrize("folder", ["", "train"], ids=["below train", "alone"])
    def test_a_part_is_set_aside_for_the_test_of_classes_without_one(self, folders, folder):
        root = Path(folders(train=("ab", 10)), folder)
        parts = []
        for _ in range(2):  # the same ones again
            data = ImageFolder(str(root), image_size=8, test_fraction=0.2, val_fraction=0.25)
            read = [data.read(split) for split in ("train", "test")]
            parts.append([{path.relative_to(root) for path in images.paths} for images in read])
            assert [images.class_counts(2).tolist() for images in read] == [[8, 8], [2, 2]]
        assert parts[0] == parts[1]
        train, test = parts[0]
        assert len(train | test) == 20
        data = prepared(data)
        loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
        assert [len(loader.dataset) for loader in loaders] == [12, 4, 4]
        assert data.class_names == ("a", "b")

    @pytest.mark.parametrize("name", ["test", "val"])
    def test_a_part_for_the_test_beside_test_images_is_refused(self, folders, name):
        root = folders(**{"train": ("ab", 10), name: ("ab", 3)})
        with pytest.raises(ConfigError, match=rf"{name} holds images to test on; leave out `test_fraction`"):
            prepared(ImageFolder(root, test_fraction=0.2))

    @pytest.mark.parametrize("fraction", [0.01, 0.99, 0.0, 1.0, -1.0])
    def test_a_part_for_the_test_that_leaves_nothing_is_refused(self, folders, fraction):
        root = folders(train=("ab", 10))
        with pytest.raises(ConfigError, match="`test_fraction"):
            prepared(ImageFolder(root, test_fraction=fraction))

    @pytest.mark.parametrize(
        ("parts", "sentence"),
        [
            ({"train": ("ab", 10)}, "chosen by 2 validation images, each worth 50% of the score"),
            (
                {"train": ("ab", 10), "val": ("ab", 20)},
                "chosen by 40 validation images, each worth 2% of the score",
            ),
            ({"train": ("ab", 5)}, "chosen by 1 validation image, each worth 100% of the score"),
            ({"train": ("ab", 1), "val": ("ab", 25)}, ""),
            ({"train": ("ab", 250)}, ""),
        ],
    )
    def test_few_validation_images_are_told_of(self, folders, caplog, parts, sentence):
        ImageFolder(folders(test=("ab", 1), **parts), image_size=8).setup("fit")
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == bool(sentence)
        assert sentence in "".join(told)

    def test_no_validation_image_is_left_of_the_classes_that_are_kept(self, folders):
        root = folders(train=("abc", 10), val=("abc", 1), test=("abc", 3))
        data = ImageFolder(root, image_size=8, classes=["a", "b"])
        read = data.read
        data.read = lambda split: read(split).subset(torch.arange(2, 3)) if split == "val" else read(split)
        with pytest.raises(ConfigError, match=r"No validation image of .* is of a class that is kept"):
            data.setup("fit")

    def test_val_and_test_are_both_used(self, folders):
        root = folders(train=("ab", 10), val=("ab", 3), test=("ab", 4))
        data = prepared(ImageFolder(root, image_size=8))
        loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
        assert [len(loader.dataset) for loader in loaders] == [20, 6, 8]

    def test_missing_folder(self, tmp_path):
        with pytest.raises(ConfigError, match=r"train does not exist.*--data\.root"):
            prepared(ImageFolder(str(tmp_path)))

    def test_empty_folder(self, tmp_path):
        (tmp_path / "train").mkdir()
        with pytest.raises(ConfigError, match="one folder per class"):
            prepared(ImageFolder(str(tmp_path)))

    def test_class_without_images(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        (tmp_path / "train" / "c").mkdir()
        with pytest.raises(ConfigError, match=r"The folder .*/train/c holds no images"):
            prepared(ImageFolder(root))

    def test_classes_that_differ(self, folders):
        with pytest.raises(ConfigError, match=r"differ.*: b is missing, c is only there\."):
            prepared(ImageFolder(folders(train=("ab", 10), test=("ac", 3))))

    def test_unreadable_image(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        (tmp_path / "train" / "a" / "4.png").write_bytes(b"?")
        with pytest.raises(ConfigError, match=r"4\.png"):
            prepared(ImageFolder(root))

    def test_hidden_folders_and_files_are_no_classes_and_no_images(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        shutil.copytree(tmp_path / "train" / "a", tmp_path / "train" / ".ipynb_checkpoints")
        shutil.copytree(tmp_path / "train" / "a", tmp_path / "train" / "a" / ".thumbnails")
        (tmp_path / "train" / "a" / "._0.png").write_bytes(b"of another system")
        data = prepared(ImageFolder(root, image_size=8, val_fraction=0.2))
        assert data.class_names == ("a", "b")
        assert len(data.train_dataloader().dataset) + len(data.val_dataloader().dataset) == 20

    def test_names_that_are_not_utf8_are_read_as_latin1(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        for part in ("train", "test"):
            os.rename(os.fsencode(tmp_path / part / "b"), os.fsencode(tmp_path / part) + b"/caf\xe9")
        assert prepared(ImageFolder(root, image_size=8)).class_names == ("a", "café")
        shutil.copytree(tmp_path / "train" / "a", tmp_path / "train" / "café")
        with pytest.raises(ConfigError, match="one name, in UTF-8 and Latin-1"):
            prepared(ImageFolder(root, image_size=8))

    @pytest.mark.parametrize("budget", [0, 10**9])
    def test_what_is_wrong_with_the_test_images_is_found_before_a_training(
        self, folders, tmp_path, monkeypatch, budget
    ):
        monkeypatch.setattr("opteq.data.images.MEMORY_BUDGET_BYTES", budget)
        root = folders(train=("ab", 10), test=("ab", 3))
        ImageFolder(root, image_size=8).setup("fit")
        path = tmp_path / "test" / "b" / "2.png"
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(ConfigError, match=r"test/b/2\.png"):
            ImageFolder(root, image_size=8).setup("fit")
        shutil.rmtree(tmp_path / "test" / "b")
        with pytest.raises(ConfigError, match=r"The classes in .*/test differ .*: b is missing"):
            ImageFolder(root, image_size=8).setup("fit")
        shutil.rmtree(tmp_path / "test")
        with pytest.raises(ConfigError, match=r"val does not exist"):
            ImageFolder(root, image_size=8).setup("fit")

    @pytest.mark.parametrize("in_channels", [None, 3])
    def test_files_of_other_kinds_are_told_of_once(self, folders, tmp_path, caplog, in_channels):
        root = folders(train=("ab", 10), test=("ab", 3))
        for name in ("a/10.heic", "a/11.svg", "b/12.svg"):
            (tmp_path / "train" / name).touch()
        (tmp_path / "test" / "b" / "Thumbs.db").touch()
        data = prepared(ImageFolder(root, image_size=8, in_channels=in_channels))
        data.read("train")
        read = "only images ending in .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp, .gif are read."
        told = [record.getMessage() for record in caplog.records]
        assert [sentence for sentence in told if "left out" in sentence] == [
            f"3 of 23 files in {root}/train are left out (.heic, .svg): {read}",
            f"1 of 7 files in {root}/test is left out (.db): {read}",
        ]

    def test_of_an_animation_the_first_image_is_read(self, folders, tmp_path):
        root = folders(train=("ab", 10), test=("ab", 3))
        first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
        for name in ("3.gif", "4.webp", "5.tiff"):
            file = tmp_path / "test" / "b" / name
            first.save(
                file,
                save_all=True,
                append_images=[second],
                **({"lossless": True} if name == "4.webp" else {}),
            )
        data = prepared(ImageFolder(root, image_size=8))
        pixels, labels = pixels_of(data.test_dataloader(), data.normalization)
        assert labels.tolist() == [0] * 3 + [1] * 6
        red = np.broadcast_to(np.array([255, 0, 0]).reshape(3, 1, 1), (3, 3, 8, 8))
        np.testing.assert_array_equal(pixels[-3:].numpy(), red)

    def test_grey_images_have_one_channel_where_all_training_images_do(self, folders, tmp_path, rng):
        root = folders(train=("ab", 10), test=("ab", 3))
        grey = rng.integers(0, 256, (8, 8), dtype=np.uint8)
        for path in tmp_path.glob("train/*/*.png"):
            Image.fromarray(grey).save(path)
        data = prepared(ImageFolder(root, image_size=8))
        images, _ = pixels_of(data.val_dataloader(), data.normalization)
        assert data.in_channels == 1
        np.testing.assert_array_equal(images[0, 0].numpy(), grey)
        data = ImageFolder(root, image_size=8)
        data.setup("test")
        assert data.in_channels == 1
        assert prepared(ImageFolder(root, image_size=8, in_channels=3)).in_channels == 3
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "train" / "b" / "0.png")
        assert prepared(ImageFolder(root, image_size=8)).in_channels == 3
        with pytest.raises(ConfigError, match="1 for grey images or 3 for colour, got 2"):
            ImageFolder(root, in_channels=2)


def test_find_images_looks_into_subfolders(folders, tmp_path):
    folders(train=("ba", 1))
    (tmp_path / "notes.txt").touch()
    assert [path.parent.name for path in find_images(tmp_path)] == ["a", "b"]


def test_find_images_follows_links_and_no_circle_of_them(folders, tmp_path):
    folders(train=("ab", 2))
    os.symlink(tmp_path / "train" / "a", tmp_path / "train" / "b" / "linked")
    os.symlink(tmp_path / "train", tmp_path / "train" / "b" / "circle")
    found = [str(path.relative_to(tmp_path)) for path in find_images(tmp_path / "train" / "b")]
    assert found[-2:] == ["train/b/linked/0.png", "train/b/linked/1.png"]
    assert found.count("train/b/0.png") == 1


def test_find_images_refuses_a_folder_without_images(tmp_path):
    with pytest.raises(ConfigError, match="no images"):
        find_images(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find_images(tmp_path / "nowhere")
