"""The commands on a data set for segmentation."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from opteq.cli import main
from opteq.data.segmentation import SegmentationFolder
from opteq.models.loading import load


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration that trains in seconds: the class of a pixel is its strongest colour."""
    root = tmp_path_factory.mktemp("scenes")
    rng = np.random.default_rng(0)
    for split, number in (("train", 24), ("val", 4), ("test", 6)):
        for i in range(number):
            mask = rng.integers(0, 3, (4, 6), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
            image = np.where(np.arange(3) == mask[..., None], 200, 40).astype(np.uint8)
            mask[0] = 255
            for part, array in (("images", image), ("masks", mask)):
                path = root / part / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
    options = {
        "seed_everything": 1,
        "model": {
            "network": {
                "class_path": "opteq.models.classifier.ImageClassifier",
                "init_args": {
                    "stem": {
                        "class_path": "opteq.models.stems.ConvStem",
                        "init_args": {"channels": 12, "downsamplings": 1},
                    },
                    "body": {
                        "class_path": "opteq.models.bodies.Deep",
                        "init_args": {"hidden": [6, 12, 12], "start": "input"},
                    },
                    "head": {"class_path": "opteq.models.heads.PixelHead"},
                },
            },
            "optimizer": "adamw",
            "learning_rate": 2e-2,
            "schedule": "poly",
        },
        "data": {
            "class_path": "opteq.data.segmentation.SegmentationFolder",
            "init_args": {
                "root": str(root),
                "names": ["red", "green", "blue"],
                "image_size": [16, 24],
                "batch_size": 4,
                "augmentation": "scale-crop-flip",
            },
        },
        "trainer": {"accelerator": "cpu", "max_epochs": 10, "enable_progress_bar": False},
    }
    path = root / "scenes.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert main(["fit", "--config", str(config), "--run", "first", "--runs_dir", str(runs)]) == 0
    return runs / "first"


@pytest.mark.spec("R2.8", "R7.7")
def test_the_summary_has_the_scores_of_the_exported_network(finished, config):
    summary = json.loads((finished / "summary.json").read_text())
    data = SegmentationFolder(**yaml.safe_load(config.read_text())["data"]["init_args"])
    data.setup("test")
    network = load(finished)
    with torch.no_grad():
        pairs = [(network(x).argmax(1)[y >= 0], y[y >= 0]) for x, y in data.test_dataloader()]
    answers, labels = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
    hits, sizes, answered = (
        np.bincount(x, minlength=3) for x in (labels[labels == answers], labels, answers)
    )
    assert len(labels) == 6 * 15 * 24
    assert summary["test_aAcc"] == pytest.approx((labels == answers).mean(), abs=1e-4)
    assert summary["test_mAcc"] == pytest.approx((hits / sizes).mean(), abs=1e-4)
    assert summary["test_mIoU"] == pytest.approx((hits / (sizes + answered - hits)).mean(), abs=1e-4)
    assert summary["test_mIoU"] > 0.5
    assert "test_accuracy" not in summary


def test_the_best_checkpoint_has_the_best_mean_intersection_over_union(finished):
    header, *rows = (line.split(",") for line in (finished / "metrics.csv").read_text().splitlines())
    scores = [float(row[header.index("val_mIoU")]) for row in rows]
    best = torch.load(finished / "checkpoints" / "best.ckpt", weights_only=True)
    assert scores[best["epoch"]] == max(scores)
    (search,) = (state for name, state in best["callbacks"].items() if name.startswith("BestCheckpoint"))
    assert search["monitor"] == "val_mIoU"


@pytest.mark.spec("R7.7")
def test_the_report_shows_scenes_and_scores(finished):
    page = (finished / "report.html").read_text()
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("mIoU", "mAcc", "aAcc"):
        assert f"<dt>Test {name}</dt><dd>{summary[f'test_{name}']:.2%}</dd>" in page
    captions = re.findall(r"<figcaption>(.+?)</figcaption>", page)
    others = [caption for caption in captions if "epoch by epoch" not in caption]
    assert len(others) == 8 < len(captions)
    assert "the classes of their pixels" in others[6]
    assert "This map has no hidden objective" in others[1]
    assert "the minimum of" not in page


@pytest.mark.spec("R7.7")
def test_test_reports_the_scores_again(finished, opteq):
    status, out, err = opteq("test", finished)
    assert status == 0, err
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("mIoU", "mAcc", "aAcc"):
        assert re.search(rf"^test_{name} +{summary[f'test_{name}']:.4g}$", out, re.MULTILINE), out


@pytest.mark.spec("R7.9")
def test_equilibria_of_scenes_are_judged_by_pixels(finished, opteq, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    status, out, err = opteq("test", run, "--suite", "equilibrium,segmentation")
    assert status == 0, err
    summary = json.loads((finished / "summary.json").read_text())
    stored = json.loads((run / "evaluation" / "equilibrium.json").read_text())["scores"]
    assert stored["full_accuracy"] == pytest.approx(summary["test_aAcc"], abs=1e-6)
    assert len(stored["layers"][0]["active"]) == 3
    stored = json.loads((run / "evaluation" / "segmentation.json").read_text())["scores"]
    for name in ("mIoU", "mAcc", "aAcc"):
        assert stored[name] == pytest.approx(summary[f"test_{name}"], abs=1e-6)
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("green "))
    assert row[2] == f"{stored['intersection_over_union']['green']:.2%}"


def test_predictions_of_whole_images_are_refused(finished, config, refuses, tmp_path):
    sentence = refuses("predict", finished, tmp_path)
    assert "this network classifies pixels; load it with opteq.load(RUN)" in sentence
    checkpoint = finished / "checkpoints" / "best.ckpt"
    assert "classifies pixels" in refuses(
        "predict", "--config", config, "--ckpt_path", checkpoint, "--images", tmp_path
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model.network.head.classes", "4"], "has 3 classes"),
        (["--model.network.head", "Head"], "is a data set for segmentation, but the output"),
        (["--model.milestones", "[0.5]"], "`milestones` are those of the schedule 'step', but it is 'poly'"),
        (["--data.image_size", "[16]"], "data.image_size"),
        (["--data.root", "nowhere"], "There is no folder nowhere/images/train"),
        (["--data.augmentation", "crop"], "'scale-crop-flip'"),
    ],
)
def test_mistakes(refuses, config, options, sentence):
    assert sentence in refuses("fit", "--config", config, *options)
