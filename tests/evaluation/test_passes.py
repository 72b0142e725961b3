import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opteq.evaluation.passes import Spread, share_of


@pytest.mark.parametrize(("images", "total"), [(7, 25), (50, 78), (700, 10_000), (3, 3), (5, 3)])
def test_no_more_images_are_taken_than_were_asked_for(images, total):
    loader = DataLoader(TensorDataset(torch.arange(total)[:, None], torch.zeros(total)), batch_size=32)
    taken = [x.squeeze(1) for x, _ in Spread(loader, share_of(loader, images))]
    places = torch.cat(taken)
    assert len(places) == min(images, total)
    # From the first one on, and evenly.
    assert places[0] == 0
    assert (places.diff() - total / len(places)).abs().max() < 1
