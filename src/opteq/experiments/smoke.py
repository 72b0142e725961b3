"""Tables cut down to a few steps on noise, which show that every row trains and is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opteq.experiments.tables import Row, Table

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PER_CLASS = {"train": 3, "val": 1, "test": 1}
SCENES = {"train": 2, "val": 1, "test": 1}
LARGEST, SCENE, WINDOW = 64, (48, 64), (32, 48)
SIDES = {"Digits": 8, "CIFAR10": 32, "CIFAR100": 32}  # of images whose size is no option
BATCH = 24  # fewer samples decorrelate at once
_MODULES = {"ConnectedPixels": "connected", "SegmentationFolder": "segmentation", "ImageFolder": "folder"}
TRAINER = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def smoke(table: Table, folder: Path) -> Table:
    """`table` with one seed, and with one epoch on files of noise that are written to `folder`."""
    return replace(table, rows=[_smoked(row, folder) for row in table.rows])


def _smoked(row: Row, folder: Path) -> Row:
    config = row.config_of(0)
    trainer = {name: value for name, value in config["trainer"].items() if name == "callbacks"}
    config |= {"data": _noise(config["data"], folder), "trainer": {**trainer, **TRAINER}}
    return replace(row, config=config, seeds=1)


def _noise(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A data module like `data` that reads few images, of noise where it is not made by the module itself."""
    options, kind = data.get("init_args", {}), data["class_path"].rpartition(".")[2]
    if kind == "ConnectedPixels":
        own = {"size": 8, "train_images": BATCH, "test_images": 8}
    elif kind in ("SegmentationFolder", "Cityscapes"):
        kind, own = "SegmentationFolder", _scenes(options, folder / "scenes")
    else:
        kind, own = "ImageFolder", _images(options, SIDES.get(kind, LARGEST), folder)
    return {"class_path": f"opteq.data.{_MODULES[kind]}.{kind}", "init_args": {**own, "batch_size": BATCH}}


def _images(options: Mapping[str, Any], side: int, folder: Path) -> dict[str, Any]:
    kept, superclasses = options.get("classes"), options.get("superclasses", False)
    names = tuple(kept or CLASSES)
    if superclasses:
        names += tuple({name.partition(".")[0] + ".unseen" for name in names})
    elif kept:
        names += ("unseen",)
    size = min(options.get("image_size", side), LARGEST)
    root = folder / f"{len(names)}-classes-of-{size}"
    for split, count in PER_CLASS.items():
        for name in names:
            for image in range(count):
                _write(root / split / name / f"{image}.png", (size, size, 3))
    own = {"root": str(root), "image_size": size, "augmentation": options.get("augmentation", "none")}
    return own | ({"classes": list(kept), "superclasses": superclasses} if kept else {})


def _scenes(options: Mapping[str, Any], root: Path) -> dict[str, Any]:
    names = options.get("names") or [f"class {number}" for number in range(19)]
    for split, count in SCENES.items():
        for scene in range(count):
            _write(root / split / "images" / f"{scene}.png", (*SCENE, 3))
            _write(root / split / "masks" / f"{scene}.png", SCENE, len(names))
    return {"root": str(root), "names": names, "image_size": list(SCENE), "crop_size": list(WINDOW)}


def _write(path: Path, shape: Sequence[int], levels: int = 256) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0).integers(0, levels, shape)
        Image.fromarray(noise.astype(np.uint8)).save(path)
