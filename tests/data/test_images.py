import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from opteq.data import images as images_module
from opteq.data.images import ArrayImages, FileImages, channels_of, read_image, read_pixels
from opteq.data.scenes import read_mask
from opteq.errors import ConfigError
from tests.data.damaged_images import originals, read_damaged


def save(path, pixels):
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_is_unchanged(tmp_path, pixels):
    result = read_image(save(tmp_path / "a.png", pixels), channels=3, size=8)
    np.testing.assert_array_equal(result.numpy(), pixels.transpose(2, 0, 1))


def test_grey_from_colour(tmp_path, pixels):
    result = read_image(save(tmp_path / "a.png", pixels), channels=1, size=8)
    luma = pixels @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(result[0].numpy(), luma, atol=1)


def test_long_images_are_resized_and_cropped_at_the_centre(tmp_path):
    wide = np.zeros((16, 48), dtype=np.uint8)
    wide[:, 16:32] = 255
    result = read_image(save(tmp_path / "a.png", wide), channels=1, size=8)
    assert result.shape == (1, 8, 8)
    assert result[0, :, 2:6].min() == 255


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    deep = np.array([[0, 257], [32896, 65535]], dtype=np.uint16)
    result = read_image(save(tmp_path / "a.png", deep), channels=1, size=2)
    np.testing.assert_array_equal(result[0].numpy(), [[0, 1], [128, 255]])


def test_floating_point_pixels_are_refused(tmp_path):
    path = save(tmp_path / "a.tif", np.array([[np.nan, 1.0]], dtype=np.float32))
    with pytest.raises(ConfigError, match=r"a\.tif holds floating-point pixels"):
        read_image(path, channels=1, size=1)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_an_unreadable_image_is_named(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.png"):
        read_image(path, channels=3, size=8)


def test_a_truncated_image_is_named(tmp_path, pixels):
    path = save(tmp_path / "cut.png", np.tile(pixels, (20, 20, 1)))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"cut\.png"):
        read_image(path, channels=3, size=8)


def test_files_are_read_into_memory_only_within_the_budget(tmp_path, pixels, monkeypatch):
    paths = [save(tmp_path / f"{i}.png", np.roll(pixels, i, axis=0)) for i in range(3)]
    files = FileImages(paths, torch.tensor([2, 1, 0]), channels=3, size=8)
    cached = files.in_memory()
    assert isinstance(cached, ArrayImages)
    for one, other in zip(files.__getitems__([2, 0]), cached.__getitems__([2, 0]), strict=True):
        assert torch.equal(one, other)
    assert files.subset(torch.tensor([1])).paths == [paths[1]]
    monkeypatch.setattr(images_module, "MEMORY_BUDGET_BYTES", 3 * 3 * 8 * 8 - 1)
    assert files.in_memory() is files


@pytest.mark.filterwarnings("ignore")  # Pillow's, about the damage
def test_a_damaged_image_of_any_format_is_read_or_refused_by_name(tmp_path):
    outcomes, failures = read_damaged(480, seed=1, folder=tmp_path)
    assert failures == []
    assert {outcome for _, outcome in outcomes} == {"read", "refused"}
    assert {ending for ending, _ in outcomes} == set(originals(1))


ORIENTATIONS = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(np.transpose(a), 2),
    8: np.rot90,
}


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_images_and_masks_are_turned_as_their_exif_data_say(tmp_path, orientation, ending):
    drawn = np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    # What is stored is turned back by viewers into what was drawn.
    Image.fromarray(drawn).save(path, exif=exif, **({"lossless": True} if ending == "webp" else {}))
    upright = ORIENTATIONS[orientation](drawn)
    np.testing.assert_array_equal(read_pixels(path, 1)[0].numpy(), upright)
    if ending != "webp":
        np.testing.assert_array_equal(read_mask(path).numpy(), upright)


def test_damaged_exif_data_leave_an_image_as_it_is_stored(tmp_path, pixels):
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path, exif=b"Exif\x00\x00not what it says")
    np.testing.assert_array_equal(read_pixels(path, 3).numpy(), pixels.transpose(2, 0, 1))


def png(depth, kind, row, **chunks):
    """A PNG file of one row, written by hand: Pillow does not write all that it reads."""

    def chunk(name, data):
        body = name.encode() + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    width = len(row) * 8 // depth // {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    header = struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0)
    parts = [("IHDR", header), *chunks.items(), ("IDAT", zlib.compress(b"\0" + row)), ("IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts)


PALETTE = bytes([10, 20, 30, 40, 50, 60])
GREY, COLOUR, INDEXED, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(8, INDEXED, b"\1\0", PLTE=PALETTE), [(40, 50, 60), (10, 20, 30)]),
        # Transparent, by each way that PNG has, is white.
        (png(8, INDEXED, b"\1\0", PLTE=PALETTE, tRNS=b"\0"), [(40, 50, 60), (255, 255, 255)]),
        (png(8, COLOUR, bytes([1, 2, 3, 4, 5, 6]), tRNS=b"\0\1\0\2\0\3"), [(255, 255, 255), (4, 5, 6)]),
        (png(8, COLOUR_ALPHA, bytes([10, 20, 30, 0, 40, 50, 60, 255])), [(255, 255, 255), (40, 50, 60)]),
        (png(8, COLOUR_ALPHA, bytes([0, 0, 255, 51])), [(204, 204, 255)]),
        (png(8, GREY_ALPHA, bytes([9, 0, 7, 255])), [(255,) * 3, (7,) * 3]),
        (png(8, GREY, bytes([9, 7]), tRNS=b"\0\x09"), [(255,) * 3, (7,) * 3]),
        # The key colour has the depth of the file: 0, 1, 2, 3 of 3.
        (png(2, GREY, b"\x1b", tRNS=b"\0\1"), [(0,) * 3, (255,) * 3, (170,) * 3, (255,) * 3]),
        (png(4, GREY, b"\x12", tRNS=b"\0\1"), [(255,) * 3, (34,) * 3]),
        (png(16, GREY, b"\x10\x00\x80\x80", tRNS=b"\x10\0"), [(255,) * 3, (128,) * 3]),
        (png(16, COLOUR, b"\x10\x20" * 3 + b"\x80\x80" * 3, tRNS=b"\x10\x20" * 3), [(255,) * 3, (128,) * 3]),
        (png(16, COLOUR_ALPHA, b"\x80\x80" * 3 + b"\xff\xff"), [(128,) * 3]),
    ],
)
def test_what_is_read_of_a_png_file_is_what_a_viewer_shows(tmp_path, data, expected):
    path = tmp_path / "a.png"
    path.write_bytes(data)
    shown = read_pixels(path, 3)[:, 0].T
    np.testing.assert_array_equal(shown.numpy(), expected)
    if all(len(set(colour)) == 1 for colour in expected):
        np.testing.assert_array_equal(read_pixels(path, 1)[0, 0].numpy(), [grey for grey, _, _ in expected])


def tiff(bits, row, *, white=1, signed=False):
    """A TIFF file of one row, little-endian, uncompressed."""
    entries = [(256, len(row) * 8 // bits), (257, 1), (258, bits), (259, 1), (262, white), (277, 1)]
    entries += [(273, 8 + 2 + 12 * 9 + 4), (279, len(row)), (339, 2 if signed else 1)]
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(entries))
    return head + fields + bytes(4) + row


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tiff(16, struct.pack("<3H", 0, 32896, 65535)), [0, 128, 255]),
        (tiff(16, struct.pack("<3H", 0, 32896, 65535), white=0), [255, 127, 0]),
        # 0, 2048 and 4095 in 12 bits each.
        (tiff(12, bytes([0x00, 0x08, 0x00, 0xFF, 0xF0, 0x00])), [0, 127, 255, 0]),
        # Without a white of their own, they are taken as they are.
        (tiff(32, struct.pack("<3i", 0, 200, 255), signed=True), [0, 200, 255]),
        (tiff(16, struct.pack("<2h", 7, 200), signed=True), [7, 200]),
        (b"P5 2 1 65535\n\x80\x80\xff\xff", [128, 255]),
        (b"P2 2 1 300\n150 300\n", [127, 255]),
    ],
)
def test_grey_levels_are_brought_to_bytes(tmp_path, data, expected):
    path = tmp_path / "a.tif"
    path.write_bytes(data)
    for channels in (1, 3):
        np.testing.assert_array_equal(read_pixels(path, channels)[:, 0].numpy(), [expected] * channels)


@pytest.mark.parametrize("levels", [(0, 256), (-1, 0), (0, 2**31 - 1)])
def test_whole_numbers_that_do_not_say_what_is_white_are_refused(tmp_path, levels):
    path = tmp_path / "a.tif"
    path.write_bytes(tiff(32, struct.pack("<2i", *levels), signed=True))
    with pytest.raises(ConfigError, match=rf"holds whole numbers from {levels[0]} to {levels[1]} that"):
        read_pixels(path, 3)


def test_channels_of_files(tmp_path, pixels):
    grey, deep, clear, colour = (tmp_path / f"{name}.png" for name in ("grey", "deep", "clear", "colour"))
    save(grey, pixels[..., 0])
    save(deep, pixels[..., 0].astype(np.uint16))
    Image.fromarray(pixels[..., 0]).convert("LA").save(clear)
    save(colour, pixels)
    assert channels_of([grey, deep, clear]) == 1
    assert channels_of([grey, colour]) == 3
