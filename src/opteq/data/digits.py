"""Handwritten digits that come with scikit-learn: 1,797 grey images of 8×8 pixels, no download."""

from typing import Any, Literal

import torch
from sklearn.datasets import load_digits

from opteq.data.base import SPLIT_SEED, ImageDataModule
from opteq.data.images import ArrayImages
from opteq.data.preprocess import Normalization
from opteq.data.splits import stratified_split

TEST_IMAGES = 360


class Digits(ImageDataModule):
    """scikit-learn's digits, with a fixed stratified test set of 360 images."""

    all_classes = tuple(str(digit) for digit in range(10))
    in_channels = 1
    image_size = 8
    normalization = Normalization(mean=(0.305,), std=(0.376,))

    def read(self, split: Literal["train", "val", "test"]) -> ArrayImages | None:
        if split == "val":
            return None
        bunch: Any = load_digits()
        # Pixels are counts from 0 to 16; they are stored as bytes like those of every other set.
        pixels = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
        labels = torch.from_numpy(bunch.target)
        test, train = stratified_split(labels, TEST_IMAGES, SPLIT_SEED)
        return ArrayImages(pixels, labels).subset(test if split == "test" else train)
