import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opteq.data.splits import stratified_split


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 3))
def test_parts_are_disjoint_complete_and_proportional(labels, share, seed):
    labels = torch.tensor(labels)
    count = round(share * len(labels))
    picked, rest = stratified_split(labels, count, seed)
    assert sorted([*picked.tolist(), *rest.tolist()]) == list(range(len(labels)))
    assert len(picked) == count
    for label in range(5):
        exact = count * int((labels == label).sum()) / len(labels)
        assert abs(int((labels[picked] == label).sum()) - exact) < 1


def test_seed_decides_the_choice():
    labels = torch.arange(4).repeat(25)
    first, again, other = (stratified_split(labels, 40, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("count", [0, 8])
def test_extreme_counts(count):
    picked, rest = stratified_split(torch.arange(8) % 2, count, 0)
    assert (len(picked), len(rest)) == (count, 8 - count)
