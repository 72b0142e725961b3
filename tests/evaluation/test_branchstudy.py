"""The study of branches against loops over channels and pixels, and perturbations against their formula."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from opteq.evaluation import branchstudy as study
from opteq.evaluation.branchstudy import BranchRecord, study_branches
from opteq.models.bodies import Coupled, Unit
from opteq.models.classifier import ImageClassifier
from opteq.models.heads import Head
from opteq.models.stems import ConvStem
from opteq.solvers.anderson import Anderson
from opteq.theory.perturbations import reconstructed
from tests.networks import branch_classifier

HIDDEN = {"readout": "hidden"}
SMALL = {"classes": 4, "channels": 3, "hidden": (4, 6), "solver": Anderson(tol=1e-5)}


def images(count=40, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def made(body=Unit, **options):
    torch.manual_seed(0)
    return branch_classifier(body, **SMALL | options).eval()


def pooled(z, factor):
    c, h, w = z.shape
    return z.reshape(c, h // factor, factor, w // factor, factor).mean((2, 4))


@pytest.mark.spec("R5.7")
@pytest.mark.parametrize("body", [Unit, Coupled])
def test_heritage_and_diversity_are_those_of_the_definition(body):
    network, x = made(body), images()
    record = study_branches(network, x, torch.zeros(len(x), dtype=torch.long))
    with torch.no_grad():
        large, small = (z.double().numpy() for z in network.features(x))
    assert record.heritage.shape == record.diversity.shape == (40,)
    # On a ring of two, each is the other's neighbour, and they meet twice.
    for sample in (0, 39):
        first, second = pooled(large[sample], 2).reshape(3, -1), small[sample].reshape(3, -1)
        inner = np.array([[a @ b for b in second] for a in first])
        off = sum(abs(inner[k, m]) for k in range(3) for m in range(3) if k != m)
        np.testing.assert_allclose(record.heritage[sample], 2 * np.trace(inner) / (2 * 3), rtol=1e-4)
        np.testing.assert_allclose(record.diversity[sample], 2 * off / (2 * (9 - 3)), rtol=1e-4)
        share = np.abs(np.diag(inner)).sum() / np.abs(inner).sum()
        np.testing.assert_allclose(record.diagonal_share[sample], share, rtol=1e-4)
        if sample == 0:
            np.testing.assert_allclose(record.correlation, np.abs(inner).T, rtol=1e-4)


@pytest.mark.parametrize("body", [Unit, Coupled])
def test_relations_are_those_of_the_states_where_hidden_variables_are_read(body):
    x, labels = images(), torch.zeros(40, dtype=torch.long)
    read, plain = (study_branches(made(body, hidden=(3, 3), **kind), x, labels) for kind in (HIDDEN, {}))
    assert (plain.diversity > 0).all()
    for name in ("heritage", "diversity", "diagonal_share", "correlation"):
        np.testing.assert_array_equal(getattr(read, name), getattr(plain, name))


@pytest.mark.spec("R5.7")
def test_accuracies_under_perturbations():
    network, x = made(), images(70, seed=1)
    with torch.no_grad():
        labels = network(x).argmax(1)
        labels[:10] = (labels[:10] + 1) % 4
    accuracy = study_branches(network, x, labels).accuracy
    assert accuracy.shape == (3, 5, len(study.SIZES))
    np.testing.assert_allclose(accuracy[:, :, 0], 60 / 70)
    with torch.no_grad():
        features = network.stem(x)
        moved = network.body(features - study.SIZES[-1] * reconstructed(network.body, features, 1.0))
        expected = (network.head(moved).argmax(1) == labels).double().mean().item()
    np.testing.assert_allclose(accuracy[0, :, -1], expected)
    assert np.ptp(accuracy[0], axis=0).max() == 0
    # Random trials differ from each other, and two studies do not.
    assert np.array_equal(accuracy, study_branches(network, x, labels).accuracy)


def test_networks_without_neighbours_or_without_branches():
    single = made(hidden=(4,))
    record = study_branches(single, images(4), torch.zeros(4, dtype=torch.long))
    assert record.heritage.shape == (0,)
    assert record.correlation.shape == (0, 0)
    assert record.sizes.shape == (len(study.SIZES),)
    alone = ImageClassifier(ConvStem(3, 4), Unit(4, 4), Head(4, 4)).eval()
    explicit = ImageClassifier(ConvStem(3, 4), nn.Identity(), Head(4, 4)).eval()
    for network in (nn.Flatten(), alone, explicit):
        none = study_branches(network, images(4), torch.zeros(4, dtype=torch.long))
        assert all(getattr(none, f.name).size == 0 for f in dataclasses.fields(BranchRecord))
