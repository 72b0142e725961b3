"""Bounds of the papers as functions of the quantities they speak of.

Each checks what can be checked of its assumptions and reports the others with its value. Bounds that
are evaluated on a model instead are in `opteq.theory.lipschitz` and `opteq.theory.certificates`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.options import check
from opteq.results import Certificate


def optequnit_generalization_bound(
    margin: float,
    input_norm: float,
    norm: float,
    gram_norm: float,
    weights_norm: float,
    width: int,
    samples: int,
    confidence: float = 0.95,
) -> Certificate:
    """How much the error of a one-layer OptEq classifier exceeds its empirical margin loss, by PAC-Bayes.

    For `y = σ(WᵀW y + U x + b)`, logits `W_c y + b_c`, `μ` the largest norm of `U, W, W_c, b` and
    `m = ‖WᵀW‖₂`, with probability `1 - δ` over `M` training samples (Li et al. 2023, Proposition 2)

        L₀ ≤ L̂_η + 4 √((KL + ln(6M√M/δ)) / (M - 1)),
        KL = 16 h ln(24h) (2μ³(B+1) + 2(1-m)μ(B+1) + (1-m)²)² N² / (η²(1-m)⁴).

    These are the constants of the proof; the printed statement has lost its factors 2 and `B + 1`, and
    those of the PAC-Bayes lemma. At the sizes in use the bound is far above 1: it orders models
    and says nothing about one.

    Args:
        margin: `η`, by which the right class must lead.
        input_norm: `B ≥ ‖x‖`.
        norm: `μ`, below 1.
        gram_norm: `m`, below 1.
        weights_norm: `N`, with `N² = ‖WᵀW‖_F² + ‖U‖_F² + ‖b‖² + ‖W_c‖_F² + ‖b_c‖²`.
        width: `h`, the largest number of rows or columns of the weights.
        samples: `M`.
        confidence: `1 - δ`.

    Raises:
        ConfigError: for numbers that the proposition does not admit.
    """
    _check_norms(norm, gram_norm, input_norm)
    rest = 1 - gram_norm
    sensitivity = 2 * norm * (input_norm + 1) * (norm**2 + rest) + rest**2
    return _margin_bound(sensitivity / rest**2, margin, weights_norm, width, samples, confidence)


def geq_generalization_bound(
    margin: float,
    input_norm: float,
    norm: float,
    gram_norm: float,
    largest_weight: float,
    weights_norm: float,
    width: int,
    samples: int,
    confidence: float = 0.95,
) -> Certificate:
    """`optequnit_generalization_bound` for the plain Gaussian map, `y = σ(βWᵀ(U x + b - W y))`.

    With `β = e^{-γ‖U x + b - W y‖²} ≤ β_max` and `r = 1 - β_max m` (Li et al. 2023, Eq. 37)

        KL = 16 h ln(24h) (2β_maxμ⁴(B+1) + 2(2μβ_max + 1) r μ(B+1) + r²)² N² / (η² r⁴),

    again with the factors 2 and `B + 1` that the printed statement has lost. The proof takes `β` for a
    constant when it perturbs the weights, which is an assumption and not a fact.

    Args:
        margin: `η`, by which the right class must lead.
        input_norm: `B ≥ ‖x‖`.
        norm: `μ`, the largest norm of `U, W, W_c, b`, below 1.
        gram_norm: `m = ‖WᵀW‖₂`, below 1.
        largest_weight: `β_max`, in (0, 1].
        weights_norm: `N`, with `N² = ‖WᵀW‖_F² + ‖U‖_F² + ‖b‖² + ‖W_c‖_F² + ‖b_c‖²`.
        width: `h`, the largest number of rows or columns of the weights.
        samples: `M`.
        confidence: `1 - δ`.

    Raises:
        ConfigError: for numbers that the proposition does not admit.
    """
    _check_norms(norm, gram_norm, input_norm)
    check(0 < largest_weight <= 1, "largest_weight", largest_weight, "in (0, 1]")
    rest = 1 - largest_weight * gram_norm
    factor = largest_weight * norm**3 + (2 * norm * largest_weight + 1) * rest
    sensitivity = 2 * norm * (input_norm + 1) * factor + rest**2
    bound = _margin_bound(sensitivity / rest**2, margin, weights_norm, width, samples, confidence)
    constant = "The kernel weight does not change when the parameters are perturbed, as the proof presumes."
    return replace(bound, assumptions=(*bound.assumptions, constant))


def _check_norms(norm: float, gram_norm: float, input_norm: float) -> None:
    check(0 < norm < 1, "norm", norm, "in (0, 1)")
    check(0 <= gram_norm < 1, "gram_norm", gram_norm, "in [0, 1)")
    check(input_norm >= 0, "input_norm", input_norm, "at least 0")


def _margin_bound(
    sensitivity: float, margin: float, weights_norm: float, width: int, samples: int, confidence: float
) -> Certificate:
    """The PAC-Bayes bound of a model whose logits change by `sensitivity` per perturbation of its weights."""
    check(margin > 0, "margin", margin, "positive")
    check(weights_norm >= 0, "weights_norm", weights_norm, "at least 0")
    check(width >= 1, "width", width, "at least 1")
    check(samples >= 2, "samples", samples, "at least 2")
    check(0 < confidence < 1, "confidence", confidence, "in (0, 1)")
    divergence = 16 * width * math.log(24 * width) * (sensitivity * weights_norm / margin) ** 2
    union = math.log(6 * samples**1.5 / (1 - confidence))
    value = torch.tensor(4 * math.sqrt((divergence + union) / (samples - 1)), dtype=torch.float64)
    assumptions = ("The activation is ReLU.", "Training samples are independent.", "Every input has ‖x‖ ≤ B.")
    return Certificate(value, "bound", assumptions)


def published_lipschitz_optequnit(norm: float) -> Certificate:
    """`Lip(x → y*) ≤ μ/(1 - μ²)` for `y = σ(WᵀW y + U x + b)` (Li et al. 2023, Proposition 3).

    Args:
        norm: `μ ≥ ‖W‖, ‖U‖`, below 1.

    Raises:
        ConfigError: if `μ` is not in [0, 1).
    """
    check(0 <= norm < 1, "norm", norm, "in [0, 1)")
    value = torch.tensor(norm / (1 - norm**2), dtype=torch.float64)
    return Certificate(value, "bound", ("The activation is ReLU.",))


def published_lipschitz_geq(largest_weight: float, norm: float, gamma: float, size: float) -> Certificate:
    """`Lip(x → y*) ≤ a/(1 - a)`, `a = β_maxμ² + √γBμ³`, for the plain Gaussian map.

    Li et al. 2023, Proposition 3, for GEQ. It holds as printed, though its proof loses a factor, but says
    less than `equilibrium_lipschitz`: an equilibrium has `⟨Wᵀr, y⟩ ≥ 0` with `r = U x - W y`, so that
    `‖r‖ ≤ ‖U x‖ ≤ μB`, and with `u = γ‖r‖²` the sum `β_max + √γBμ ≥ e^{-u} + √u` is at least 1. The bound is
    never below `μ²/(1 - μ²)`.

    Args:
        largest_weight: `β_max ≥ e^{-γ‖U x - W y‖²}`.
        norm: `μ ≥ ‖W‖, ‖U‖`, below 1.
        gamma: `γ`.
        size: `B ≥ ‖x‖, ‖y‖`.

    Raises:
        ConfigError: for numbers that the proposition does not admit, or `a ≥ 1`.
    """
    check(0 <= largest_weight <= 1, "largest_weight", largest_weight, "in [0, 1]")
    check(0 <= norm < 1, "norm", norm, "in [0, 1)")
    check(gamma > 0, "gamma", gamma, "positive")
    check(size >= 0, "size", size, "at least 0")
    rate = largest_weight * norm**2 + math.sqrt(gamma) * size * norm**3
    if rate >= 1:
        raise ConfigError(
            f"Proposition 3 needs β_maxμ² + √γBμ³ below 1, got {rate:.3g}; use `equilibrium_lipschitz`."
        )
    return Certificate(
        torch.tensor(rate / (1 - rate), dtype=torch.float64),
        "bound",
        (
            "The activation is ReLU, and there are no patches and no bias.",
            "γ is fixed.",
            "β_max and B hold for all inputs on the segment between the two that are compared.",
        ),
    )


def optequnit_similarity_bound(
    x1: Tensor, x2: Tensor, variance: float, width: int, norm: float
) -> Certificate:
    """`κ = E[y(x_1)ᵀy(x_2)] ≤ n E[U²] ‖x_1‖‖x_2‖ / (2(1-μ²)²)`, over random `U`.

    For `y = σ(WᵀW y + U x)` with `n` hidden units, `‖W‖ ≤ μ` and entries of `U` that are independent
    `N(0, E[U²])`: `‖y‖ ≤ ‖σ(U x)‖ / (1-μ²)` and `E‖σ(U x)‖² = ½ n E[U²] ‖x‖²`; the inequality of Cauchy and
    Schwarz does the rest. The printed bound (Li et al. 2023, Proposition 4) drops `n`, and its factor
    `(sin θ + (π-θ) cos θ)/π` would make it zero at `x_2 = -x_1`, where `κ` is not.

    Args:
        x1: `(batch, features)`.
        x2: `(batch, features)`.
        variance: `E[U²]`.
        width: `n`.
        norm: `μ`, below 1.

    Raises:
        ConfigError: for numbers out of range.
    """
    check(variance >= 0, "variance", variance, "at least 0")
    check(width >= 1, "width", width, "at least 1")
    check(0 <= norm < 1, "norm", norm, "in [0, 1)")
    lengths = torch.linalg.vector_norm(x1.double(), dim=1) * torch.linalg.vector_norm(x2.double(), dim=1)
    return Certificate(
        width * variance * lengths / (2 * (1 - norm**2) ** 2),
        "bound",
        ("The activation is ReLU.", "U is Gaussian and independent of W.", "There is no bias."),
    )


def kernel_weight_bound(
    x1: Tensor, x2: Tensor, gamma: float, smallest: float, norm: float, state_norm: float
) -> Certificate:
    """`β_1β_2 ≤ e^{γB²‖W‖²} e^{-γσ_min(U)²‖x_1-x_2‖²/4}` for `β_i = e^{-γ‖U x_i - W y_i‖²}`.

    What holds of Proposition 4 of Li et al. 2023 for the Gaussian map: unlike inputs cannot both be
    close to their equilibria. From `‖a‖² + ‖b‖² ≥ ½‖a-b‖²` and `‖p-q‖² ≥ ½‖p‖² - ‖q‖²`, with
    `‖y_1-y_2‖² ≤ 2B²` for nonnegative states.

    Args:
        x1: `(batch, features)`.
        x2: `(batch, features)`.
        gamma: `γ`, the same for both.
        smallest: `σ_min(U)`, the least `‖U x‖` over unit vectors: 0 if `U` has more columns than rows.
        norm: `‖W‖₂`.
        state_norm: `B ≥ ‖y_1‖, ‖y_2‖`.

    Raises:
        ConfigError: for numbers out of range.
    """
    check(gamma > 0, "gamma", gamma, "positive")
    check(smallest >= 0, "smallest", smallest, "at least 0")
    check(norm >= 0, "norm", norm, "at least 0")
    check(state_norm >= 0, "state_norm", state_norm, "at least 0")
    distance = (x1.double() - x2.double()).square().sum(1)
    exponent = gamma * ((state_norm * norm) ** 2 - smallest**2 * distance / 4)
    return Certificate(
        exponent.exp(), "bound", ("The activation is ReLU, so that states are nonnegative.", "γ is fixed.")
    )
