"""What suites write; the scores have tests of their own."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opteq.data.digits import Digits
from opteq.data.facts import Facts
from opteq.data.segmentation import SegmentationFolder
from opteq.errors import ConfigError
from opteq.evaluation.saliency import grad_cam
from opteq.evaluation.suites.case import SuiteOptions
from opteq.evaluation.suites.names import suite_names
from opteq.evaluation.suites.run import run_suites
from opteq.layer import EquilibriumLayer
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.conv import Conv2d
from tests.evaluation.test_subclasses import Animals, Answers

OF = {"checkpoint": "abc"}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(4, 4, 3), Conv2d(1, 4, 3)))
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(4 * 64, 10)).eval()


@pytest.fixture(scope="module")
def digits():
    data = Digits(batch_size=64)
    data.setup("test")
    return Facts(data, "test")


def stored(folder, name):
    return json.loads((folder / "evaluation" / f"{name}.json").read_text())


def width(path):
    with Image.open(path) as picture:
        return picture.width


@pytest.mark.parametrize("name", ["corruptions", "attacks", "saliency", "equilibrium"])
def test_a_suite_has_files_and_a_table(network, digits, tmp_path, name):
    text = run_suites([name], network, digits, tmp_path, OF, SuiteOptions(2, epsilons=[0.1], restarts=1))
    content = stored(tmp_path, name)
    assert content["checkpoint"] == "abc"
    for figure in content["figures"]:
        assert width(tmp_path / "evaluation" / figure) > 300
        assert figure in text
    assert content["figures"] == [f"{name}.png"] or "equilibrium-spectra.png" in content["figures"]
    assert all(table["title"] in text for table in content["tables"])
    assert " 2 images" in text or "equilibrium, 2 test images" in text
    # What shows only a few leaves images out by itself.
    assert ("(358 left out by --suite_images)" in text) == (name != "saliency")
    scores = content["scores"]
    if name == "corruptions":
        assert scores["mean"] == pytest.approx(np.mean(list(scores["accuracy"].values())))
        row = next(line.split() for line in text.splitlines() if line.strip().startswith("fog "))
        assert row[1:] == [f"{a:.2%}" for a in (*scores["accuracy"]["fog"], scores["means"]["fog"])]


@pytest.mark.spec("R7.2")
def test_unknown_images_come_from_a_folder(network, digits, tmp_path):
    folder = tmp_path / "unknown"
    folder.mkdir()
    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")
    text = run_suites(["ood"], network, digits, tmp_path, OF, SuiteOptions(unknown=str(folder)))
    scores = stored(tmp_path, "ood")["scores"]
    assert scores["raw"]["temperature"] == 1
    with torch.no_grad():
        rows = [(network(x).softmax(1), y) for x, y in digits.test_dataloader()]
    p, labels = (torch.cat(column) for column in zip(*rows, strict=True))
    assert (
        scores["raw"]["accuracy"] == scores["scaled"]["accuracy"] == (p.argmax(1) == labels).double().mean()
    )
    expected = -p[torch.arange(len(p)), labels].log().mean().item()
    assert scores["raw"]["known_kl"] == pytest.approx(expected, rel=1e-5)
    # The network was never trained: less sure of itself it is less wrong.
    assert scores["scaled"]["known_kl"] < scores["raw"]["known_kl"]
    assert text.startswith("360 images of known classes, 5 images of unknown\n")
    assert width(tmp_path / "evaluation" / "ood.png") > 300


def test_what_is_known_of_a_checkpoint_is_not_computed_again(network, digits, tmp_path):
    options = SuiteOptions(images=4, epsilons=[0.1], restarts=1)
    first = run_suites(["attacks"], network, digits, tmp_path, OF, options)
    # None cannot be evaluated.
    assert run_suites(["attacks"], None, digits, tmp_path, OF, options) == first
    for other in (OF | {"checkpoint": "new"}, OF):
        changed = SuiteOptions(images=4, epsilons=[0.2], restarts=1) if other is OF else options
        with pytest.raises(AttributeError):
            run_suites(["attacks"], None, digits, tmp_path, other, changed)
    # A figure that was removed is drawn from the parts that are known.
    (tmp_path / "evaluation" / "attacks.png").unlink()
    run_suites(["attacks"], network, digits, tmp_path, OF, options)
    assert (tmp_path / "evaluation" / "attacks.png").is_file()


@pytest.mark.spec("R7.6")
def test_saliency_says_where_it_looks(network, digits, tmp_path):
    run_suites(["saliency"], network, digits, tmp_path, OF, SuiteOptions())
    found = stored(tmp_path, "saliency")["scores"]["images"]
    assert len(found) == 8
    every = [torch.cat(column) for column in zip(*digits.test_dataloader(), strict=True)]
    # The first image is always among those that are evenly spread.
    image = every[0][:1]
    heat = grad_cam(network, image)[0].numpy()
    assert found[0]["peak"] == list(np.unravel_index(heat.argmax(), heat.shape))
    assert found[0]["label"] == digits.class_names[int(every[1][0])]
    falling = np.sort(heat.ravel())[::-1]
    enough = next(k for k in range(1, 65) if falling[:k].sum() >= heat.sum() / 2 * (1 - 1e-6))
    assert found[0]["half"] == pytest.approx(enough / 64)


@pytest.mark.spec("R7.5")
def test_sub_classes(tmp_path):
    data = Animals(superclasses=True, fold=0)
    data.setup("test")
    text = run_suites(["subclasses"], Answers(), Facts(data, "test"), tmp_path, OF, SuiteOptions())
    assert text.startswith("Super-class found on 9 images, by sub-class\n")
    scores = stored(tmp_path, "subclasses")["scores"]
    assert (scores["known_accuracy"], scores["unknown_accuracy"]) == (1, 0.5)
    assert [line.split()[-1] for line in text.splitlines() if "all " in line] == ["100.00%", "50.00%"]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(0)
    for i in range(3):
        mask = rng.integers(0, 3, (6, 8), dtype=np.uint8)
        image = np.where(np.arange(3) == mask[..., None], 200, 40).astype(np.uint8)
        mask[0], mask[1, 1] = 255, 2
        for part, array in (("images", image), ("masks", mask)):
            path = root / part / "test" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    data = SegmentationFolder(str(root), (6, 8), names=["red", "green", "blue"])
    data.setup("test")
    return Facts(data, "test")


@pytest.mark.spec("R7.7")
def test_segmentation(scenes, tmp_path):
    text = run_suites(["segmentation"], nn.Identity(), scenes, tmp_path, OF, SuiteOptions())
    assert text.startswith("Classes of pixels of 3 images; ")
    scores = stored(tmp_path, "segmentation")["scores"]
    batches = [(x.argmax(1), y) for x, y in scenes.test_dataloader()]
    answers, labels = (torch.cat(column).numpy() for column in zip(*batches, strict=True))
    seen = labels >= 0
    for c, name in enumerate(scenes.class_names):
        both = ((answers == c) & (labels == c) & seen).sum()
        either = (((answers == c) | (labels == c)) & seen).sum()
        assert scores["intersection_over_union"][name] == pytest.approx(both / either)
        assert scores["accuracy"][name] == pytest.approx(both / (labels == c).sum())
    assert scores["mIoU"] == pytest.approx(np.mean(list(scores["intersection_over_union"].values())))
    assert scores["aAcc"] == pytest.approx((answers == labels)[seen].mean())
    assert 0.9 < scores["aAcc"] < 1


def test_suites_for_other_data_are_refused(network, digits, scenes, tmp_path):
    def refused(name, facts, **options):
        with pytest.raises(ConfigError) as error:
            run_suites([name], network, facts, tmp_path, OF, SuiteOptions(**options))
        return str(error.value)

    assert refused("segmentation", digits) == (
        "The suite segmentation is for segmentation, but Digits is for classification."
    )
    assert "is for classification" in refused("attacks", scenes)
    assert refused("ood", digits, unknown="nowhere") == "The folder nowhere does not exist."
    assert "--unknown" in refused("ood", digits)
    assert "--data.fold 0" in refused("subclasses", digits)
    assert "no equilibrium layer" in refused_without_layer(digits, tmp_path)
    assert "colour images of 32×32 pixels, but those of Digits" in refused(
        "corruptions", digits, corrupted=str(tmp_path), images=4
    )


def refused_without_layer(digits, folder):
    explicit = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ConfigError) as error:
        run_suites(["equilibrium"], explicit, digits, folder, OF, SuiteOptions(images=4))
    return str(error.value)


def test_names_of_suites():
    assert suite_names("attacks, ood,attacks") == ["attacks", "ood"]
    with pytest.raises(ConfigError, match=r"no suite 'attack'; did you mean attacks"):
        suite_names("attack")
