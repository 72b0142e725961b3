"""The command `opteq show` as a user starts it."""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opteq.models.loading import folder_of
from opteq.show.loading import open_viewer
from opteq.show.server import ShowServer


def test_it_serves_a_pretrained_network_until_it_is_interrupted():
    command = [sys.executable, "-m", "opteq", "show", "digits", "--port", "0", "--no_browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"digits is at (http://127\.0\.0\.1:\d+/) on this machine; .*\n", line)[1]
        with urllib.request.urlopen(f"{address}api/network") as response:
            shown = json.load(response)
        assert shown["title"] == "digits"
        assert len(shown["images"]) == 24
        assert re.fullmatch(r"test image 1, \d", shown["images"][0]["name"])
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out.strip(), err) == (0, "Ended.", "Loading digits …\n")


def test_the_browser_is_opened_unless_told(opteq, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    opened = []
    monkeypatch.setattr(ShowServer, "serve_forever", interrupted)
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = opteq("show", "digits", "--port", 0)
    assert (result.status, result.err) == (0, "Loading digits …\n")
    assert opened[0] in result.out
    assert opteq("show", "digits", "--port", 0, "--no-browser").status == 0
    assert len(opened) == 1


def test_mistakes(refuses):
    assert "required: run" in refuses("show")
    assert "nowhere holds no trained model" in refuses("show", "nowhere")
    assert "Port 99999 cannot be used" in refuses("show", "digits", "--port", 99999)


def test_a_run_without_its_data_can_be_looked_at_all_the_same(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(folder_of("digits"), folder)
    assert open_viewer(folder).describe()["absent"].startswith("There are no test images to choose from: ")
    (folder / "config.yaml").write_text("data: {class_path: opteq.data.digits.Digits}\n")
    shown = open_viewer(folder).describe()
    assert (shown["title"], shown["absent"], len(shown["images"])) == ("mine", "", 24)
    (folder / "config.yaml").write_text("data: {class_path: mine.Data}\n")
    assert "mine.Data" in open_viewer(folder).describe()["absent"]


def test_images_of_all_classes_can_be_chosen(tmp_path):
    run = tmp_path / "mine"
    shutil.copytree(folder_of("digits"), run)
    for name in "0123456789":
        folder = tmp_path / "images" / "test" / name
        folder.mkdir(parents=True)
        for i in range(5):
            Image.fromarray(np.full((8, 8), 25 * i, np.uint8)).save(folder / f"{i}.png")
    config = {"class_path": "opteq.data.folder.ImageFolder", "init_args": {"root": f"{tmp_path / 'images'}"}}
    (run / "config.yaml").write_text(json.dumps({"data": config}))
    names = [image["name"] for image in open_viewer(run).describe()["images"]]
    numbers = [i * 50 // 24 for i in range(24)]
    assert names == [f"test image {number + 1}, {number // 5}" for number in numbers]


@pytest.mark.parametrize(("name", "images"), [("connected", 24), ("cifar10-176k", 0)])
def test_the_other_pretrained_networks(name, images):
    assert len(open_viewer(Path(name)).describe()["images"]) == images
