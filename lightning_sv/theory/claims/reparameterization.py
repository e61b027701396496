"""OR and ER: separate magnitude and direction are faster than γ itself.

Table 1: preconditioners of all designs.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lightning_sv.theory.claims.base import Finding, claim
from lightning_sv.theory.claims.shared_checks import at_an_instant, early, throughout
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import (
    STUDENTS,
    TEACHERS,
    branch_of,
    exponential,
    original_space,
    preconditioner,
)

_SOURCE = "Theorem 3.2 and Theorem D.2"
_START = "W(0) = 0, γ = 1, α = 1, β = 1 at t = 0"
_DESIGNS = ("f", "hg", "ap", "dp", "or", "er")


def or_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3)(1 − 1/d) ‖W*‖_F⁴ (paper, Theorem D.2 (ii)); teacher (c, d) in Fractions."""
    square = Fraction((teacher * teacher).sum())
    return Fraction(-2, 3) * (1 - Fraction(1, teacher.shape[1])) * square * square


def stated_preconditioner(alpha: Array, beta: Array) -> Array:
    """Return P = d ĝĝᵀ + ρ (I − ĝĝᵀ), ĝ = γ/‖γ‖, ρ = β²d/‖α‖²; α (d,), β (1,) -> (d, d).

    Paper, Section 3.3.
    """
    d = alpha.size
    gamma = original_space(alpha, beta)
    along = np.outer(gamma, gamma) / (gamma @ gamma)
    rho = beta[0] ** 2 * d / (alpha @ alpha)
    return np.asarray(d * along + rho * (np.eye(d) - along))


def stated_exponential(alpha: Array, beta: Array) -> Array:
    """Return P = diag(γ²) + (1 − 1/d) γγᵀ; α (d,), β (1,) -> (d, d).

    It follows from ∂γ/∂α = diag(γ)(I − 11ᵀ/d) and ∂γ/∂β = γ.

    The paper has no formula (Table 1: "multiplicative/log-space scale metric").
    """
    gamma = exponential(alpha, beta)
    return np.asarray(np.diag(gamma**2) + (1 - 1 / alpha.size) * np.outer(gamma, gamma))


@claim("or", _SOURCE, "(i)", "on ψ's trajectory, or ρ = β²d/‖α‖² ≥ 1 (used in the proof)")
def _at_an_instant() -> Finding:
    """dL_ψ/dt ≤ dL_f/dt ≤ 0 where W_f = W_ψ, γ = β Norm(α)."""
    return at_an_instant("or")


@claim("or", _SOURCE, "(ii)", _START)
def _early() -> Finding:
    """L_ψ − L_f = −(2/3)(1 − 1/d) ‖W*‖_F⁴ t³ + O(t⁴)."""
    return early("or", or_coefficient)


@claim("or", _SOURCE, "(iii)", f"{_START}; d > 1, columns of W* of equal positive norm")
def _throughout() -> Finding:
    """L_ψ(t) < L_f(t) for every t > 0."""
    return throughout(
        "or", "f", "(iii) ψ stays below f: balanced columns", [t for t in TEACHERS if t.balanced]
    )


@claim("or", "Section 3.3", "P", "α ≠ 0, β ≠ 0")
def _preconditioner() -> Finding:
    """γ̇ = −P ∇L, P = d ĝĝᵀ + ρ (I − ĝĝᵀ)."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(300):
        # keep α away from 0, because Norm has no derivative there
        alpha = rng.standard_normal(rng.integers(1, 7))
        alpha *= rng.uniform(0.5, 2) / np.linalg.norm(alpha)
        beta = rng.standard_normal(1)
        ours = preconditioner(original_space, [alpha, beta])
        worst = max(worst, float(np.abs(ours - stated_preconditioner(alpha, beta)).max()))
    note = "J Jᵀ by differentiation of β·Norm(α) against the formula, 300 random states"
    return Finding(0.0, worst, worst, worst < 1e-10, note)


@claim("er", "Table 1; the formula is ours", "P", "any state")
def _exponential() -> Finding:
    """γ̇ = −P ∇L, P = diag(γ²) + (1 − 1/d) γγᵀ."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(300):
        d = int(rng.integers(1, 7))
        alpha = rng.standard_normal(d)
        beta = rng.standard_normal(1)
        ours = preconditioner(exponential, [alpha, beta])
        stated = stated_exponential(alpha, beta)
        worst = max(worst, float(np.abs(ours - stated).max() / np.abs(ours).max()))
    ones = np.ones(4)
    at_start = stated_exponential(np.zeros(4), np.zeros(1))
    is_that_of_or = np.allclose(at_start, stated_preconditioner(ones, np.ones(1)), atol=1e-12)
    note = "J Jᵀ by differentiation, 300 random states; at γ = 1 it is OR's P: d along γ, 1 across"
    return Finding(0.0, worst, worst, worst < 1e-12 and is_that_of_or, note)


@claim("er", "ours, as Theorem D.2 (ii)", "(ii)", "W(0) = 0, γ = 1, α = 0, β = 0 at t = 0")
def _exponential_early() -> Finding:
    """L_ER − L_f = −(2/3)(1 − 1/d) ‖W*‖_F⁴ t³ + O(t⁴): to this order ER is OR."""
    return early("er", or_coefficient)


class _Field(NamedTuple):
    """Scale of each entry of W on one side, as a function of its own parameters."""

    scale: Array  #: u or v, (c, d)
    preconditioner: Array  #: J Jᵀ of the scale, flattened by rows, (c·d, c·d)


def table_1(name: str, blocks: list[Array]) -> Array:
    """Return K = D² + (u W)(u W)ᵀ ∘ P_v + (W v)(W v)ᵀ ∘ P_u of A = U ∘ W ∘ V, (c·d, c·d).

    u and v are the scale of each entry of W on the output and input side; P_u and P_v are J Jᵀ of
    these fields in their own parameters. Entries of u W, W v are those of U ∘ W and W ∘ V,
    flattened by rows; D² is diag(U ∘ U ∘ V ∘ V). If a design has no vector on a side, the field is
    1 and P is 0.
    """
    w, *scales = blocks
    u, p_u = _output_field(name, scales, *w.shape)
    v, p_v = _input_field(name, scales, *w.shape)
    by_u = (u * w).ravel()
    by_v = (w * v).ravel()
    return np.asarray(
        np.diag((u * v).ravel() ** 2) + np.outer(by_u, by_u) * p_v + np.outer(by_v, by_v) * p_u
    )


def _output_field(name: str, scales: list[Array], c: int, d: int) -> _Field:
    ones = np.ones((c, d))
    if name in ("ap", "dp"):
        same_row = np.kron(np.eye(c), np.ones((d, d)))
        return _Field(scales[0][:, None] * ones, same_row)
    return _Field(ones, np.zeros((c * d, c * d)))


def _input_field(name: str, scales: list[Array], c: int, d: int) -> _Field:
    ones = np.ones((c, d))
    every_row = np.ones((c, c))  # one vector scales all rows
    match name:
        case "f" | "dp":
            return _Field(scales[-1] * ones, np.kron(every_row, np.eye(d)))
        case "hg":
            branch = branch_of(c)
            same_branch = branch[:, None] == branch
            return _Field(scales[0][branch], np.kron(same_branch, np.eye(d)))
        case "or":
            field = original_space(*scales) * ones
            return _Field(field, np.kron(every_row, stated_preconditioner(*scales)))
        case "er":
            field = exponential(*scales) * ones
            return _Field(field, np.kron(every_row, stated_exponential(*scales)))
        case _:
            return _Field(ones, np.zeros((c * d, c * d)))


@claim(
    "table1",
    "Section 3.4, Table 1; the formula is ours",
    "J Jᵀ",
    "any state of f, HG, AP, DP, OR, ER; c, d ≤ 4",
)
def _unified() -> Finding:
    """vec(Ȧ) = −K ∇L with K = diag(U²V²) + (UW)(UW)ᵀ∘P_v + (WV)(WV)ᵀ∘P_u."""
    rng = np.random.default_rng(0)
    worst = dict.fromkeys(_DESIGNS, 0.0)
    for name in _DESIGNS:
        for _ in range(60):
            c, d = (int(n) for n in rng.integers(1, 5, 2))
            blocks = [rng.standard_normal(block.shape) for block in STUDENTS[name].initial(c, d)]
            k = STUDENTS[name].preconditioner(blocks)
            error = float(np.abs(table_1(name, blocks) - k).max() / np.abs(k).max())
            worst[name] = max(worst[name], error)
    note = "J Jᵀ by differentiation against the formula, 60 random states each: " + ", ".join(
        f"{name} {error:.0e}" for name, error in worst.items()
    )
    largest = max(worst.values())
    return Finding(0.0, largest, largest, largest < 1e-12, note)
