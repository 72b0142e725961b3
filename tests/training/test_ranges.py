"""Options out of range and damaged files of a run end in one sentence."""

import pytest
import torch
from torch import nn

from opteq.data.digits import Digits
from opteq.errors import ConfigError
from opteq.models.parts import build
from opteq.training.checkpoints import read_checkpoint
from opteq.training.metrics_csv import MetricsCSV
from opteq.training.module import ClassifierModule


@pytest.mark.parametrize("option", [{"learning_rate": 0.0}, {"weight_decay": -1.0}, {"label_smoothing": 1.0}])
def test_optimizer_options_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        ClassifierModule(nn.Linear(1, 1), **option)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ConfigError, match="num_workers"):
        Digits(num_workers=-1)


@pytest.mark.parametrize("text", ["foo\n1\n", "epoch,step\nx,y\n", "epoch,step\n,\n"])
def test_damaged_metrics_are_named(tmp_path, text):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"metrics\.csv is damaged"):
        MetricsCSV(path, epochs=1)


@pytest.mark.parametrize(
    "content",
    [{"epoch": "1", "state_dict": {}}, {"epoch": 1, "state_dict": [1]}, {"epoch": 1, "state_dict": {"a": 1}}],
)
def test_a_file_in_the_form_of_no_checkpoint_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match="is not a checkpoint of a training run"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("spec", [{"class_path": 3}, {"class_path": "opteq.Dense", "init_args": [3]}])
def test_a_damaged_model_card_is_refused(spec):
    with pytest.raises(ConfigError, match="class_path with a mapping"):
        build(spec)
