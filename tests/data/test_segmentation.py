import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from opteq.data import scenes as scenes_module
from opteq.data.cityscapes import Cityscapes
from opteq.data.images import ArrayImages
from opteq.data.preprocess import Normalization
from opteq.data.scenes import IGNORED, VOID, FileScenes, ScenePreprocess
from opteq.data.segmentation import SegmentationFolder
from opteq.errors import ConfigError

PLAIN = Normalization((0.0,) * 3, (1 / 255,) * 3)


def save(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Writes scenes of 6×8 pixels and returns their root; the image shows ten times its mask."""

    def write(layout="{part}/{split}", classes=3, **numbers):
        rng = np.random.default_rng(0)
        for split, number in numbers.items():
            for i in range(number):
                mask = rng.integers(0, classes, (6, 8), dtype=np.uint8)
                mask[0, 0] = VOID
                image = np.repeat(np.where(mask == VOID, 0, 10 * mask)[..., None], 3, 2).astype(np.uint8)
                for part, array in (("images", image), ("masks", mask)):
                    save(tmp_path / layout.format(part=part, split=split) / f"{i}.png", array)
        return str(tmp_path)

    return write


def prepared(data):
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


def scenes_of(loader, normalization):
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalization)
    return ((images * std + mean) * 255).round(), labels


@pytest.mark.spec("R2.8")
@pytest.mark.parametrize("layout", ["{part}/{split}", "{split}/{part}"])
def test_reads_images_with_their_masks(folder, layout):
    root = folder(layout, train=10, val=3, test=4)
    data = prepared(SegmentationFolder(root, (6, 8), batch_size=2))
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert [len(loader.dataset) for loader in loaders] == [10, 3, 4]
    assert data.class_names == ("0", "1", "2")
    for loader in loaders:
        images, labels = scenes_of(loader, data.normalization)
        assert labels.dtype == torch.int64
        assert (labels[:, 0, 0] == IGNORED).all()
        assert set(labels.unique().tolist()) == {IGNORED, 0, 1, 2}
        known = labels != IGNORED
        assert torch.equal(images[:, 0][known], 10.0 * labels[known])


def test_validation_is_a_slice_of_train_where_there_is_one_other_split(folder):
    data = prepared(SegmentationFolder(folder(train=10, val=3), (6, 8), val_fraction=0.2, train_limit=5))
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert [len(loader.dataset) for loader in loaders] == [5, 2, 3]


def test_names_of_the_classes(folder, tmp_path):
    root = folder(train=6, test=1)
    (tmp_path / "classes.txt").write_text("sky\nroad\ntree\nnever seen\n")
    assert prepared(SegmentationFolder(root, (6, 8))).class_names == ("sky", "road", "tree", "never seen")
    assert prepared(SegmentationFolder(root, (6, 8), names=list("abc"))).class_names == ("a", "b", "c")


def test_another_number_for_pixels_without_a_class(folder):
    data = prepared(SegmentationFolder(folder(train=6, test=2), (6, 8), ignore_index=2))
    images, labels = scenes_of(data.test_dataloader(), data.normalization)
    assert len(data.class_names) == 2
    assert ((labels == IGNORED) == ((images[:, 0] == 20) | (images[:, 0] == 0) & (labels < 0))).all()
    assert (labels[images[:, 0] == 20] == IGNORED).all()


def test_scenes_are_resized_without_mixing_class_numbers(tmp_path):
    mask = np.zeros((4, 6), np.uint8)
    mask[:, 3:] = 2
    image = np.repeat(mask[..., None] * 100, 3, 2)
    paths = (tmp_path / "a.png", tmp_path / "b.png")
    for path, array in zip(paths, (image, mask), strict=True):
        save(path, array)
    images, masks = FileScenes(*([p] for p in paths), (8, 12), torch.arange(256).byte(), 3).__getitems__([0])
    assert images.shape == (1, 3, 8, 12)
    expected = torch.zeros(8, 12, dtype=torch.uint8)
    expected[:, 6:] = 2
    assert torch.equal(masks[0], expected)


def test_class_numbers_are_those_of_a_palette_not_its_colours(tmp_path):
    numbers = np.arange(6, dtype=np.uint8).reshape(2, 3)
    image = Image.fromarray(numbers, mode=None).convert("P")
    image.putdata(numbers.flatten().tolist())
    image.putpalette([255, 0, 0] * 256)
    image.save(tmp_path / "p.png")
    np.testing.assert_array_equal(scenes_module.read_mask(tmp_path / "p.png"), numbers)


def test_scenes_are_read_into_memory_only_within_the_budget(folder, monkeypatch):
    files = SegmentationFolder(folder(train=3, test=1), (6, 8)).read("train")
    cached = files.in_memory()
    assert isinstance(cached, ArrayImages)
    for one, other in zip(files.__getitems__([2, 0]), cached.__getitems__([2, 0]), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(scenes_module, "MEMORY_BUDGET_BYTES", 3 * 4 * 6 * 8 - 1)
    assert files.in_memory() is files


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: (root / "masks/train/1.png").unlink(), r"1\.png has no mask .*masks/train/1\.png"),
        (
            lambda root: save(root / "masks/train/1.png", np.full((6, 8), 7, np.uint8)),
            "class 7, but the 3 cl",
        ),
        (lambda root: save(root / "masks/train/1.png", np.zeros((3, 8), np.uint8)), r"8×3 pixels.*8×6"),
        (lambda root: save(root / "masks/train/1.png", np.zeros((6, 8, 3), np.uint8)), "image of mode RGB"),
        (lambda root: (root / "masks/train/1.png").write_bytes(b"?"), r"Could not read .*masks/train/1\.png"),
        (
            lambda root: (root / "images/train/1.png").write_bytes(b"?"),
            r"Could not read .*images/train/1\.png",
        ),
    ],
)
def test_a_wrong_file_is_named(folder, tmp_path, break_it, message):
    root = folder(train=6, test=1)
    break_it(tmp_path)
    with pytest.raises(ConfigError, match=message):
        prepared(SegmentationFolder(root, (6, 8), names=list("abc")))


@pytest.mark.parametrize("budget", [0, 10**9])
def test_pixels_of_each_class_are_counted(folder, monkeypatch, budget):
    monkeypatch.setattr(scenes_module, "MEMORY_BUDGET_BYTES", budget)
    data = prepared(SegmentationFolder(folder(train=6, test=1), (6, 8), batch_size=9))
    labels = torch.cat([y for _, y in data.train_dataloader()])
    assert data.class_counts.tolist() == [(labels == c).sum() for c in range(3)]


def test_grey_scenes_have_one_channel(folder, tmp_path):
    root = folder(train=6, test=2)
    for path in tmp_path.glob("images/*/*.png"):
        Image.open(path).convert("L").save(path)
    data = prepared(SegmentationFolder(root, (6, 8)))
    images, labels = scenes_of(data.test_dataloader(), data.normalization)
    assert images.shape == (2, 1, 6, 8)
    assert torch.equal(images[:, 0][labels >= 0], 10.0 * labels[labels >= 0])
    assert prepared(SegmentationFolder(root, (6, 8), in_channels=3)).in_channels == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\nb\na\n", "names a class twice"), (b"caf\xe9\nb\nc\n", "no.* text file in UTF-8")],
)
def test_bad_names_of_classes(folder, tmp_path, content, message):
    root = folder(train=6, test=1)
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepared(SegmentationFolder(root, (6, 8)))


def test_bad_options_and_missing_folders(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no folder .*images/train\. Name the folder .*--data\.root"):
        prepared(SegmentationFolder(str(tmp_path / "nowhere"), (6, 8)))
    root = folder(train=6, test=1)
    with pytest.raises(ConfigError, match="`ignore_index` from 0 to 255, got 256"):
        SegmentationFolder(root, (6, 8), ignore_index=256)
    with pytest.raises(ConfigError, match=r"`image_size` \[0, 8\]"):
        SegmentationFolder(root, (0, 8))
    with pytest.raises(ConfigError, match="leaves some out"):
        prepared(SegmentationFolder(root, (6, 8))).unseen_dataloader()


def ramps():
    """A scene whose red and green tell column and row, four and two grey levels apart."""
    rows, columns = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="ij")
    return torch.stack([4 * columns, 2 * rows, torch.full_like(rows, 255)]).byte(), rows, columns


@pytest.mark.spec("R2.8")
def test_image_and_mask_stay_aligned_in_random_views():
    """Everywhere in a view the image still tells the place that the mask holds."""
    torch.manual_seed(0)
    image, rows, columns = ramps()
    preprocess = ScenePreprocess(PLAIN, "scale-crop-flip", (48, 72))
    sizes, flips = set(), set()
    for masks, channel, step in ((columns, 0, 4), (rows, 1, 2)):
        images, labels = preprocess((image.expand(40, -1, -1, -1), masks.byte().expand(40, -1, -1)))
        assert images.shape == (40, 3, 48, 72)
        assert labels.shape == (40, 48, 72)
        void = labels == IGNORED
        assert (images[void.unsqueeze(1).expand_as(images)] == 0).all()
        assert not (images[:, 2][~void] == 0).any()
        # The nearest pixel of the mask is at most half a pixel away; resizing rounds once in each direction.
        assert ((images[:, channel] / step - labels)[~void].abs() <= 0.5 + 1 / step + 1e-4).all()
        if channel == 0:
            for label, hole in zip(labels, void, strict=True):
                line = label[~hole.all(1)][0]
                known = line[line != IGNORED]
                flips.add(bool(known[-1] < known[0]))
                sizes.add(len(known) / len(known.unique()))
    assert flips == {True, False}
    assert min(sizes) == 1
    assert max(sizes) > 1.7


def test_flips_turn_image_and_mask_together():
    torch.manual_seed(0)
    image, _, columns = ramps()
    images, labels = ScenePreprocess(PLAIN, "flip", (60, 60))(
        (image.expand(200, -1, -1, -1), columns.byte().expand(200, -1, -1))
    )
    assert torch.equal(images[:, 0].round(), 4.0 * labels)
    assert 60 < (labels[:, 0, 0] == 59).sum() < 140


def test_without_augmentation_a_scene_is_only_normalised():
    image, _, columns = ramps()
    columns[0, 0] = VOID
    normalization = Normalization((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    images, labels = ScenePreprocess(normalization, "none", (4, 4))((image[None], columns[None].byte()))
    mean, std = (np.reshape(values, (3, 1, 1)) for values in normalization)
    np.testing.assert_allclose(images[0].numpy(), (image.numpy() / 255 - mean) / std, atol=1e-6)
    columns[0, 0] = IGNORED
    assert torch.equal(labels[0], columns)


class TestCityscapes:
    @pytest.mark.spec("R2.8")
    def test_has_the_19_training_classes_and_tests_on_val(self, tmp_path):
        by_id = {c.id: c for c in torchvision.datasets.Cityscapes.classes if c.id >= 0}
        ids = np.arange(34, dtype=np.uint8).reshape(2, 17)
        for split, number in (("train", 4), ("val", 2)):
            for i in range(number):
                save(tmp_path / "leftImg8bit" / split / "ulm" / f"ulm_{i}_0_leftImg8bit.png", ids)
                save(tmp_path / "gtFine" / split / "ulm" / f"ulm_{i}_0_gtFine_labelIds.png", ids)
        data = prepared(Cityscapes(str(tmp_path), image_size=(2, 17), val_fraction=0.25))
        _, labels = scenes_of(data.test_dataloader(), data.normalization)
        assert len(labels) == 2
        assert (len(data.train_dataloader().dataset), len(data.val_dataloader().dataset)) == (3, 1)
        assert len(data.class_names) == 19
        assert (data.class_names[0], data.class_names[18]) == ("road", "bicycle")
        for number, label in zip(ids.flatten(), labels[0].flatten().tolist(), strict=True):
            if by_id[number].ignore_in_eval:
                assert label == IGNORED
            else:
                assert data.class_names[label] == by_id[number].name

    def test_missing_says_how_to_get_it(self, tmp_path):
        with pytest.raises(ConfigError, match=r"gtFine_trainvaltest\.zip .*--data\.root"):
            prepared(Cityscapes(str(tmp_path)))
