"""Damaged images of every format; `python -m tests.data.damaged_images 10000` reads so many of them."""

import io
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from opteq.data.images import channels_of, read_image
from opteq.data.scenes import read_mask
from opteq.errors import ConfigError


def originals(seed):
    """Encoded images by the ending of their names, in all the ways of their formats."""
    draw = np.random.default_rng(seed)
    colour = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    grey, deep = colour.convert("L"), Image.fromarray(draw.integers(0, 65536, (24, 32), dtype=np.uint16))
    turned = Image.Exif()
    turned[0x112] = 6

    def encode(image, kind, **options):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    palette, clear = colour.quantize(16), colour.convert("RGBA")
    packed = [
        encode(image, "TIFF", compression=way)
        for image in (colour, grey, deep)
        for way in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
    ]
    return {
        "png": [
            encode(colour, "PNG", exif=turned),
            encode(deep, "PNG"),
            encode(clear, "PNG"),
            encode(palette, "PNG", transparency=1),
            encode(grey.convert("1"), "PNG"),
        ],
        "apng.png": [encode(colour, "PNG", save_all=True, append_images=[colour.rotate(180)])],
        "jpg": [
            encode(colour, "JPEG", exif=turned),
            encode(grey, "JPEG"),
            encode(colour, "JPEG", progressive=True),
            encode(colour.convert("CMYK"), "JPEG"),
        ],
        "bmp": [encode(image, "BMP") for image in (colour, grey, palette, clear)],
        "tif": [
            *packed,
            encode(colour, "TIFF", exif=turned),
            encode(grey.convert("1"), "TIFF", compression="group4"),
            encode(colour, "TIFF", compression="jpeg"),
        ],
        "ppm": [encode(colour, "PPM"), b"P3\n3 2\n255\n" + b" ".join(b"%d" % i for i in range(18))],
        "pgm": [
            encode(grey, "PPM"),
            encode(deep, "PPM"),
            b"P2\n3 2\n300\n0 50 100 150 200 250\n",
            b"P5\n4 2\n100\n" + bytes(range(8)),
            b"P1\n4 2\n1 0 1 0\n0 1 0 1\n",
        ],
        "webp": [encode(colour, "WEBP", exif=turned), encode(clear, "WEBP", lossless=True)],
    }


def damage(data, draw):
    """Cut off, overwrite, take out or put in some bytes, often near the start."""
    data = bytearray(data)
    at = draw.randrange(len(data) if draw.random() < 0.6 else min(64, len(data)))
    length = draw.randrange(1, 40)
    noise = bytes(draw.choice((0, 255, draw.randrange(256))) for _ in range(draw.randrange(1, 8)))
    match draw.randrange(5):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + length]
        case 2:
            data[at : at + length] = bytes(length)
        case 3:
            data[at:at] = noise
        case 4:
            data[at : at + len(noise)] = noise
    return bytes(data)


def read_damaged(count, seed, folder):
    """Read `count` damaged images in every way; returns how many were read or refused, and the failures."""
    draw, files = random.Random(seed), originals(seed)
    outcomes, failures = Counter(), []
    ways = (
        lambda path: read_image(path, 3, 8),
        lambda path: read_image(path, 1, 8),
        read_mask,
        lambda path: channels_of([path]),
    )
    for number in range(count):
        ending = list(files)[number % len(files)]
        path = Path(folder) / f"image.{ending}"
        path.write_bytes(damage(draw.choice(files[ending]), draw))
        for read in ways:
            try:
                read(path)
                outcomes[ending, "read"] += 1
            except ConfigError as error:
                outcomes[ending, "refused"] += 1
                if "\n" in str(error) or str(path) not in str(error):
                    failures.append(f"{ending}: {error}")
            except Exception as error:
                failures.append(f"{ending}: {error!r}")
    return outcomes, failures


if __name__ == "__main__":
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        counts, wrong = read_damaged(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0, place)
    print(*sorted(counts.items()), *wrong, sep="\n")
    print(f"{len(wrong)} failures in {time.monotonic() - start:.0f} s.")
