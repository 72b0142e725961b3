"""Objects that hold tensors in their fields."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.tensors.held import CONSTANT, HoldsTensors


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Inner(HoldsTensors):
    a: Tensor


@dataclass(frozen=True)
class Outer(HoldsTensors):
    name: str
    inner: Inner
    pair: Pair
    many: tuple[Inner | Tensor, ...]
    mask: Tensor = field(metadata=CONSTANT)
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.inner.a)


def held() -> Outer:
    a, b, c, d, e, mask = (torch.tensor(float(n)) for n in range(6))
    return Outer("it", Inner(a), Pair(b, c), (Inner(d), e), mask)


def test_tensors_are_those_of_the_fields_in_order():
    assert [t.item() for t in held().tensors] == [0, 1, 2, 3, 4]


def test_other_tensors_keep_the_structure():
    other = held().with_tensors(tuple(10 + t for t in held().tensors))
    assert [t.item() for t in other.tensors] == [10, 11, 12, 13, 14]
    assert type(other.pair) is Pair
    assert other.name == "it"
    assert other.mask.item() == 5
    assert other.doubled.item() == 20  # what is computed from fields follows them


def test_detached_tensors_are_cut_off():
    inner = Inner(torch.ones(2, requires_grad=True))
    assert not inner.detach().tensors[0].requires_grad


@pytest.mark.parametrize("value", [[torch.ones(1)], {"a": torch.ones(1)}], ids=["list", "dict"])
def test_collections_that_can_change_are_refused(value: object):
    with pytest.raises(ConfigError, match="in tuples"):
        _ = Inner(value).tensors  # type: ignore[arg-type]
