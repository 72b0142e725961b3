"""Memory that cannot be had is asked for, and the error is said in one sentence."""

import numpy as np
import pytest
import torch

import opteq
from opteq.errors import ConfigError
from opteq.system.shortage import shortage


def torch_cpu():
    torch.empty(2**20, 2**25)


def numpy_array():
    np.zeros((2**20, 2**24))


def accelerator():
    # As on a GPU.
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total ...")


def beyond_addresses():
    torch.empty(2**31 - 1, 2**31 - 1)


def compiled_code():
    raise MemoryError("There is no memory for what compiled code keeps meanwhile; use smaller batches.")


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (torch_cpu, "There is no memory for 128 TiB at once"),
        (numpy_array, "There is no memory for 128 TiB at once"),
        (accelerator, "There is no memory for 20.00 GiB at once"),
        (beyond_addresses, "There is no memory for more bytes than can be counted at once"),
        (compiled_code, "There is not enough memory"),
        (lambda: torch.ones(2) @ torch.ones(3), None),
    ],
)
def test_what_was_asked_for(ask, sentence):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        ask()
    assert shortage(raised.value) == sentence


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: opteq.Dense(2**25, 2**20),
            r"memory for 128 TiB at once, a weight of shape \(1048576, 33554432\)",
        ),
        (lambda: opteq.Conv2d(2**20, 2**20, 5), "memory for 100 TiB at once, a weight of shape"),
        (lambda: opteq.Dense(2**31 - 1, 2**31 - 1), "memory for more bytes than can be counted at once"),
    ],
)
def test_weights_that_are_too_large(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()
