"""Accuracy on images that are corrupted, and on the published arrays."""

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from PIL import Image
from torch import nn

from opteq.data.cifar import CIFAR10
from opteq.errors import ConfigError
from opteq.evaluation.corrupting.corrupt import CORRUPTIONS, corrupt
from opteq.evaluation.corruptions import corrupted_accuracy
from opteq.evaluation.parts import Parts

NORMALIZATION = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


class Brighter(nn.Module):
    """Class 1 where the sum of all pixels is above that of a grey image."""

    def __init__(self, normalization=NORMALIZATION):
        super().__init__()
        self.mean, self.std = (torch.tensor(v).reshape(-1, 1, 1) for v in normalization)

    def forward(self, x):
        excess = (x * self.std + self.mean - 0.5).double().sum((1, 2, 3))
        return torch.stack([-excess, excess], 1)


def made_by_hand(images, name, severity, grey=False):
    """Bytes `(n, h, w, channels)`, from one stream of random numbers for each name and severity."""
    random = RandomState([CORRUPTIONS.index(name), severity])
    made = [corrupt(im.repeat(3, 2) if grey else im, name, severity, random) for im in images]
    return [np.array(Image.fromarray(m).convert("L"))[..., None] for m in made] if grey else made


@pytest.mark.spec("R7.3")
@pytest.mark.parametrize("channels", [1, 3])
def test_the_corrupted_images_are_normalised_and_judged(channels):
    normalization = NORMALIZATION if channels == 3 else ((0.5,), (0.25,))
    pixels = RandomState(0).randint(100, 157, (12, 8, 8, channels)).astype(np.uint8)
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in normalization)
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std
    labels = torch.arange(12) % 2
    batches = [(images[:5], labels[:5]), (images[5:], labels[5:])]
    parts = Parts()
    # Two of the parts are enough: the others are known.
    wanted = [("contrast", 3), ("snow", 5), ("gaussian_noise", 2)]
    known = {f"{name} {s}": 0.0 for name in CORRUPTIONS for s in range(1, 6) if (name, s) not in wanted}
    parts.content["parts"] = known
    accuracy = corrupted_accuracy(Brighter(normalization), batches, normalization, parts=parts)
    for name, severity in wanted:
        made = made_by_hand(pixels, name, severity, channels == 1)
        bright = [(m / 255).mean() > 0.5 for m in made]
        expected = np.mean(np.array(bright) == labels.numpy())
        assert accuracy[name][severity - 1] == pytest.approx(expected)


def test_so_many_images_are_taken_evenly():
    images, labels = torch.zeros(20, 3, 8, 8), torch.arange(20)

    class Counting(nn.Module):
        def forward(self, x):
            counts.append(len(x))
            return torch.zeros(len(x), 20)

    counts = []
    parts = Parts()
    parts.content["parts"] = {
        f"{n} {s}": 0 for n in CORRUPTIONS for s in range(1, 6) if (n, s) != ("contrast", 1)
    }
    batches = [(images[i : i + 4], labels[i : i + 4]) for i in range(0, 20, 4)]
    accuracy = corrupted_accuracy(Counting(), batches, NORMALIZATION, images=10, parts=parts)
    assert sum(counts) == 10
    # Every second image, among them the first, whose class is 0.
    assert accuracy["contrast"][0] == pytest.approx(1 / 10)


def test_images_of_two_channels_are_refused():
    batches = [(torch.zeros(1, 2, 8, 8), torch.zeros(1, dtype=torch.long))]
    with pytest.raises(ConfigError, match="1 or 3 channels to corrupt, got 2"):
        corrupted_accuracy(nn.Identity(), batches, ((0.5, 0.5), (0.5, 0.5)))


@pytest.fixture(scope="module")
def corrupted(tmp_path_factory):
    """Two images for each severity; the pixel (0, 0) holds the class or, of some, another."""
    folder = tmp_path_factory.mktemp("data") / "CIFAR-10-C"
    folder.mkdir()
    labels = np.tile([3, 7], 5)
    np.save(folder / "labels.npy", labels)
    for number, name in enumerate(CORRUPTIONS):
        images = np.zeros((10, 32, 32, 3), dtype=np.uint8)
        images[:, 0, 0, 0] = labels
        images[: number % 3, 0, 0, 0] = 9  # the first images of severity 1 are no longer recognised
        np.save(folder / f"{name}.npy", images)
    return folder


class ReadPixel(nn.Module):
    def forward(self, x):
        mean, std = CIFAR10.normalization.mean[0], CIFAR10.normalization.std[0]
        value = ((x[:, 0, 0, 0] * std + mean) * 255).round().long()
        return nn.functional.one_hot(value, 10).float()


@pytest.mark.spec("R7.3")
def test_accuracy_under_published_corruptions_is_that_of_each_severity(corrupted):
    assert len(CORRUPTIONS) == 19
    # The arrays hold the images of the mildest first; of every third corruption both are not recognised.
    scores = corrupted_accuracy(ReadPixel(), corrupted, CIFAR10.normalization)
    for number, name in enumerate(CORRUPTIONS):
        assert scores[name] == pytest.approx((1 - (number % 3) / 2, 1, 1, 1, 1))


def test_missing_and_damaged_corruptions_are_named(corrupted, tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"There is no .*labels\.npy; unpack CIFAR-10-C"):
        corrupted_accuracy(ReadPixel(), folder, CIFAR10.normalization)
    for path in corrupted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "fog.npy").write_bytes((folder / "fog.npy").read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"fog\.npy is damaged"):
        corrupted_accuracy(ReadPixel(), folder, CIFAR10.normalization)
    np.save(folder / "fog.npy", np.zeros((9, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(
        ConfigError, match=r"bytes of shape \(10, 32, 32, 3\), one image per label, got uint8"
    ):
        corrupted_accuracy(ReadPixel(), folder, CIFAR10.normalization)
    np.save(folder / "labels.npy", np.zeros(7, dtype=np.uint8))
    with pytest.raises(ConfigError, match="classes for 5 severities"):
        corrupted_accuracy(ReadPixel(), folder, CIFAR10.normalization)
