"""Classifiers that tests of several folders build."""

from opteq.configs import read_config
from opteq.models.bodies import Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.parts import build, complete
from opteq.models.stems import ConvStem

GREY = ("Digits", "FashionMNIST")
CLASSES = {
    "CIFAR100": 100,
    "Cityscapes": 19,
    "SegmentationFolder": 11,
    "imagenet": 1000,
    "imagenet100": 100,
    "tiny_imagenet30": 30,
}


def unit_classifier(in_channels=3, classes=10, channels=4, hidden=4, pool=1, **options):
    """One OptEq unit behind the default stem and head."""
    body = Unit(channels, hidden, **options)
    return ImageClassifier(ConvStem(in_channels, channels), body, Head(channels, classes, pool=pool))


def branch_classifier(
    body=Unit,
    in_channels=3,
    classes=10,
    channels=8,
    hidden=(8, 16),
    reductions=None,
    widths=(),
    downsamplings=0,
    fusion="concat",
    pool=2,
    dropout=0.0,
    **options,
):
    """A body of branches behind stem and head of the papers, with nothing normalised after the stem."""
    reductions = (1, 2, 4, 8)[: len(hidden)] if reductions is None else reductions
    body = body(channels, hidden, reductions=reductions, **({"bias": False} | options))
    stem = ConvStem(in_channels, channels, downsamplings, widths)
    head = Head(channels, classes, len(hidden), fusion, norm=False, pool=pool, dropout=dropout)
    return ImageClassifier(stem, body, head)


def count(module):
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


def preset_network(name):
    """The network of a packaged configuration, with what follows from its data."""
    return network_of(read_config(name))


def network_of(config):
    """The network of a configuration, with what follows from its data."""
    data = config["data"]
    kind, root = data["class_path"].rpartition(".")[2], data.get("init_args", {}).get("root", "")
    given = data.get("init_args", {}).get("classes")
    classes = CLASSES.get(kind, CLASSES.get(root.rpartition("/")[2], 10)) if given is None else len(given)
    complete(config["model"]["network"], 1 if kind in GREY else 3, classes)
    return build(config["model"]["network"])
