import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


def test_certified_digits(capsys):
    load("certified_digits").main(epochs=4)
    output = capsys.readouterr().out
    accuracy, *certified = [
        float(line.split()[1].rstrip("%")) for line in output.splitlines() if "accuracy" in line
    ]
    assert accuracy > 70
    assert accuracy > certified[0] > 0
    assert certified == sorted(certified, reverse=True)


def test_convert_network():
    assert load("convert_network").main() <= 1e-5


@pytest.mark.spec("R6.1")
def test_own_similarity(tmp_path, capsys):
    load("own_similarity").main(tmp_path / "figure.png", epochs=2)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert float(capsys.readouterr().out.split()[-1].rstrip("%")) > 90


@pytest.mark.spec("R5.2")
def test_the_width_of_the_diversity_makes_a_fixed_point(capsys):
    rows = load("diversity_width").main(taus=(0.0, 1e-3))
    assert "excess" in capsys.readouterr().out
    (hard, soft), tau = [rows[tau] for tau in (0.0, 1e-3)], 1e-3
    assert hard[2] > 1e-5
    assert soft[2] <= 1e-10
    assert soft[1] < 25
    # The objective of the paper, and its D, change by less than τ.
    assert abs(soft[3] / hard[3] - 1) < tau
    assert abs(soft[4] / hard[4] - 1) < 1e-2 * tau


@pytest.mark.spec("R5.5")
def test_a_weight_within_the_bound_converges(tmp_path, capsys):
    reached = load("coupling_strength").main(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "0.001" in capsys.readouterr().out
    # 0.9² (1 + 31 λ) < 1 up to λ = 0.0075.
    assert all(residual <= 1.1e-10 for residual in (reached[0.001][1], reached[0.005][1]))


@pytest.mark.spec("R6.4", "R6.7")
def test_lipschitz_bounds_of_trained_layers_are_never_exceeded():
    rows = load("lipschitz_bounds").main(pairs=2_000, steps=40)
    assert len(rows) == 4
    for ours, printed, pairs, ascent in rows:
        assert pairs > 0
        assert max(pairs, ascent) <= min(ours, printed) * (1 + 1e-5)  # what the solves leave


def test_global_convergence_draws_its_figure(tmp_path, capsys):
    load("global_convergence").main(tmp_path / "figure.png", steps=5)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "over-parametrised: loss 2.3" in capsys.readouterr().out


@pytest.mark.spec("R4.4")
def test_gradient_descent_on_a_wide_model_converges_linearly_with_weights_that_stay():
    train = load("global_convergence").train
    losses, norms = train(60, 120, 120)
    assert losses[-1] < 1e-8 * losses[0]
    # A linear rate: the logarithm falls along a straight line once the transient is over.
    steps = torch.arange(40, 120, dtype=torch.float64)
    logs = losses[40:].double().log()
    slope = ((steps - steps.mean()) * (logs - logs.mean())).sum() / (steps - steps.mean()).square().sum()
    line = logs.mean() + slope * (steps - steps.mean())
    assert slope < -0.1
    assert (logs - line).abs().max() < 0.5
    # A small set: no norm moves by more than a few hundredths, and all stay below 1.
    assert ((norms / norms[0]).log().abs() < 0.03).all()
    assert (norms < 0.6).all()


@pytest.mark.spec("R4.4")
def test_a_narrow_model_has_no_such_rate():
    losses, _ = load("global_convergence").train(3, 4, 120)
    assert losses[-1] > 0.1 * losses[0]


def test_an_equilibrium_looks_further_than_its_first_iterates(tmp_path):
    scores = load("connected_pixels").main(tmp_path / "figure.png", count=20)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    for found in scores.values():
        assert found["equilibrium"] > found["K = 1"] + 0.1
    assert scores[16]["equilibrium"] > 0.85
