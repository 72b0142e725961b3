import dataclasses

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, top_k_accuracy_score
from torch import nn

# The module, because pytest takes a class called TestRecord for a test.
import opteq.evaluation.record as records
from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.evaluation.record import evaluate
from opteq.evaluation.sections import equilibria
from opteq.evaluation.trace import trace
from opteq.models.bodies import Unit
from opteq.models.classifier import ImageClassifier


@pytest.fixture
def record(network, data):
    return evaluate(network, data.test_dataloader(), data.class_names, data.normalization, "cpu")


@pytest.fixture
def expected(network, data):
    """Probabilities of the whole test set in one batch, as a NumPy array."""
    with torch.no_grad():
        logits = network.eval()(data.images).double().numpy()
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def fixed(logits):
    """A network whose answer to the image `i` (a single pixel) is row `i` of `logits`."""

    class Fixed(nn.Module):
        def forward(self, images):
            return torch.as_tensor(logits)[images.flatten().long()]

    return Fixed()


def batch(labels):
    labels = torch.as_tensor(labels)
    return [(torch.arange(len(labels)).float().reshape(-1, 1, 1, 1), labels)]


@pytest.mark.spec("R7.1")
def test_scores_agree_with_sklearn(record, expected, data):
    labels, predictions = data.labels.numpy(), expected.argmax(1)
    top3 = top_k_accuracy_score(labels, expected, k=3, labels=range(expected.shape[1]))
    assert record.accuracy() == pytest.approx(accuracy_score(labels, predictions))
    assert 0.4 < record.accuracy() < 0.9
    assert record.accuracy(top=3) == pytest.approx(top3)
    np.testing.assert_array_equal(record.labels, labels)
    np.testing.assert_array_equal(record.predictions, predictions)
    np.testing.assert_allclose(record.confidences, expected.max(1), atol=1e-5)
    np.testing.assert_array_equal(record.confusion, confusion_matrix(labels, predictions))


def test_ties_are_broken_the_same_way_in_every_score():
    record = evaluate(fixed(np.zeros((3, 4), np.float32)), batch([0, 1, 3]), "abcd", (0, 1), "cpu")
    assert record.accuracy() == pytest.approx(1 / 3) == np.trace(record.confusion) / 3
    assert record.accuracy(top=2) == pytest.approx(2 / 3)


@pytest.mark.spec("R7.1")
def test_solver_counts_are_those_of_the_solves(record, network, data):
    with torch.no_grad():
        infos = [network[1].solve(network[0](x)).info for x in data.images.split(32)]
    steps = torch.cat([info.steps for info in infos]).double()
    assert record.solves == len(data.images)
    assert record.unconverged == 0
    assert record.solver_steps_mean == pytest.approx(float(steps.mean()))
    assert record.residual_max == pytest.approx(max(float(i.residual.max()) for i in infos))


def test_unconverged_solves_are_counted(network, data):
    network[1].solver = dataclasses.replace(network[1].solver, max_steps=1)
    network[1].on_unconverged = "count"
    record = evaluate(network, data.test_dataloader(), data.class_names, data.normalization, "cpu")
    assert record.unconverged == record.solves == len(data.images)


def test_the_mistakes_shown_are_the_most_confident_ones(record, expected, data):
    wrong = expected.argmax(1) != data.labels.numpy()
    best = np.sort(expected.max(1)[wrong])[::-1][: records.SHOWN_SAMPLES]
    np.testing.assert_allclose(record.mistakes.confidences, best, atol=1e-5)
    assert (record.mistakes.predictions != record.mistakes.labels).all()


def test_samples_show_their_own_unnormalised_image(record, data):
    originals = data.images * torch.tensor(data.normalization[1])[:, None, None]
    originals = (originals + torch.tensor(data.normalization[0])[:, None, None]).numpy()
    assert (record.right.predictions == record.right.labels).all()
    assert len(record.right.images) == records.SHOWN_SAMPLES
    for samples in (record.right, record.mistakes):
        for i, image in enumerate(samples.images):
            distance = np.abs(originals.transpose(0, 2, 3, 1) - image).max((1, 2, 3))
            index = distance.argmin()
            assert distance[index] < 1e-6
            assert samples.labels[i] == data.labels[index]
            assert samples.confidences[i] == record.confidences[index]


def test_traces_lead_to_the_equilibria_of_their_images(record, network, data):
    mean, deviation = (torch.tensor(v) for v in data.normalization)
    images = ((torch.tensor(record.traces.images) - mean) / deviation).permute(0, 3, 1, 2)
    with torch.no_grad():
        z = network[1](network[0](images)).numpy()
    np.testing.assert_allclose(record.traces.rms, np.sqrt((z**2).mean(1)), rtol=1e-2, atol=1e-4)
    for row, channel in enumerate(record.traces.channel_indices):
        np.testing.assert_allclose(record.traces.channels[:, row], z[:, channel], atol=1e-3)
    spread = np.var(z, axis=(0, 2, 3))
    assert set(record.traces.channel_indices) == set(np.argsort(spread)[-3:])


@pytest.mark.parametrize(("readout", "symbol"), [("state", "z"), ("hidden", "y")])
def test_what_is_read_of_the_equilibrium_is_traced_and_named(readout, symbol):
    network = ImageClassifier(nn.Identity(), Unit(4, 6, readout=readout), nn.Flatten())
    images = torch.rand(2, 4, 5, 5)
    with torch.no_grad():
        traces = trace(network.eval(), images, (0.0, 1.0))
    assert traces.symbol == symbol
    read = network.body(images).double()
    np.testing.assert_allclose(traces.rms, read.square().mean(1).sqrt().detach(), rtol=0.02)
    assert f"Above each {symbol}* stands" in equilibria(traces)


def test_residual_and_objective_fall_along_a_trace(record):
    traces = record.traces
    assert traces.residual.shape == traces.energy.shape
    assert traces.residual.dtype == np.float64
    np.testing.assert_allclose(traces.residual[:, 0], 1.0)  # z⁰ = 0
    assert (traces.residual[:, -1] < 1e-6).all()
    assert (np.diff(traces.energy, axis=1) < 1e-9).all()


def test_the_network_keeps_its_mode_and_the_global_generator_its_state(network, data):
    before = torch.get_rng_state()
    for mode in (True, False):
        network.train(mode)
        statistics = network[2].running_mean.clone()
        evaluate(network, data.test_dataloader(), data.class_names, data.normalization, "cpu")
        assert network.training is mode
        assert torch.equal(network[2].running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_without_equilibria_has_no_traces():
    record = evaluate(fixed(np.eye(3, dtype=np.float32)), batch([0, 1, 2]), "abc", (0, 1), "cpu")
    assert record.solves == 0
    assert len(record.traces.images) == 0
    assert len(record.mistakes.images) == 0
    assert record.accuracy() == 1.0


def test_an_empty_test_set_is_refused():
    with pytest.raises(ConfigError, match="test set is empty"):
        evaluate(fixed(np.eye(2)), [], "ab", (0, 1), "cpu")


def test_labels_without_a_class_name_are_refused():
    with pytest.raises(ConfigError, match=r"labels from 0 to 1.* got 0 to 2"):
        evaluate(fixed(np.eye(3, 2)), batch([0, 2, 1]), "ab", (0, 1), "cpu")


def test_logits_that_do_not_fit_the_class_names_are_refused():
    with pytest.raises(ShapeError, match=r"\(2, 3\), one per class name, got \(2, 2\)"):
        evaluate(fixed(np.eye(2)), batch([0, 1]), "abc", (0, 1), "cpu")


def test_answers_that_are_not_finite_are_refused():
    logits = np.eye(3)
    logits[1, 0] = np.nan
    with pytest.raises(NonFiniteError, match="1 of 3 images"):
        evaluate(fixed(logits), batch([0, 1, 2]), "abc", (0, 1), "cpu")


def same(a, b):
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def test_a_saved_record_comes_back_as_it_was(record, tmp_path):
    record.save(tmp_path / "record.npz")
    loaded = records.TestRecord.load(tmp_path / "record.npz")
    assert same(loaded, record)
    assert not same(dataclasses.replace(loaded, residual_max=7.0), record)


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"No test record at .*record\.npz"):
        records.TestRecord.load(tmp_path / "record.npz")


def test_a_damaged_or_foreign_record_is_refused(record, tmp_path):
    path = tmp_path / "record.npz"
    record.save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="not a complete test record"):
        records.TestRecord.load(path)
    np.savez(path, labels=np.zeros(3))
    with pytest.raises(ConfigError, match="not a complete test record"):
        records.TestRecord.load(path)


def test_a_record_with_pickled_content_is_not_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the record was unpickled",))

    np.savez(tmp_path / "record.npz", class_names=np.array([Trap()], dtype=object))
    with pytest.raises(ConfigError, match="not a complete test record"):
        records.TestRecord.load(tmp_path / "record.npz")
