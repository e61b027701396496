"""Limits of the claims without the conditions of their proofs, with counterexamples.

These statements are expected to fail; one that holds is CONTRADICTED.
"""

from functools import partial

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, claim, ratio_panel
from lightning_sv.theory.claims.shared_checks import PAIRINGS, State
from lightning_sv.theory.flow import TIMES, LossRatio, loss_ratio
from lightning_sv.theory.students import STUDENTS, Student

_limit = partial(claim, "limits", expected="fails")
_F = STUDENTS["f"]
_G = STUDENTS["g"]
_DP = STUDENTS["dp"]
_OR = STUDENTS["or"]
RANDOM_STATES = 20_000


def _anywhere(name: str, example: State, label: str) -> Finding:
    """Count violations of (i) in random states; `example` is a small counterexample."""
    pairing = PAIRINGS[name]
    rng = np.random.default_rng(0)
    rates = pairing.rates([pairing.random(rng) for _ in range(RANDOM_STATES)])
    violated = rates.violated
    ratio = rates.student / rates.standard
    share = float(violated.mean())
    is_drawn = np.arange(RANDOM_STATES) < 2000  # enough for a picture
    fast = is_drawn & ~violated
    slow = is_drawn & violated
    panel = pairing.panel(
        f"{name.upper()} (i): off the trajectory {pairing.student.name} can be slower",
        [
            Line("at least as fast", rates.guard[fast], ratio[fast], marks=True, colour="blue"),
            Line(
                f"slower: {share:.0%} of all",
                rates.guard[slow],
                ratio[slow],
                marks=True,
                colour="vermillion",
            ),
        ],
        limits=(0.03, 300),
    )
    guarded = violated[rates.guard >= 1].sum()
    at_example = pairing.rates([example])
    note = (
        f"share of {RANDOM_STATES:,} random states that violate it ({guarded} of them guarded); "
        f"for example {label}: {at_example.student[0]:g} against f's {at_example.standard[0]:g}"
    )
    error = float(np.sqrt(share * (1 - share) / RANDOM_STATES))
    return Finding(0.0, share, error, share == 0, note, (panel,))


def _fails_at(
    title: str, student: Student, baseline: Student, counterexamples: dict[str, LossRatio]
) -> Finding:
    """Check that the ratio L_student / L_baseline exceeds 1 at each known counterexample."""
    lines = []
    notes = []
    for label, ratio in counterexamples.items():
        lines.append(Line(label, *ratio))
        notes.append(
            f"{label}: above 1 from t = {ratio.first_above(1):.2f}, "
            f"{ratio.largest:.2f} at t = {ratio.time_of_largest:.2f}"
        )
    panel = ratio_panel(title, student.name, baseline.name, lines, (0.05, 20))
    ratios = list(counterexamples.values())
    is_refuted = all(ratio.exceeds_one for ratio in ratios)
    return Finding(
        "< 1", ratios[0].largest, None, not is_refuted, note="; ".join(notes), panels=(panel,)
    )


@_limit(
    "Theorem 3.1 and D.1 (i), as printed", "DP (i)", "every parameter standard normal, c, d ≤ 4"
)
def _double_anywhere() -> Finding:
    """dL_φ/dt ≤ dL_f/dt at any state with γ = γb, W_f = diag(γa) W_φ."""
    blocks = [np.zeros((1, 1)), np.array([0.5]), np.ones(1)]
    example = State(blocks, teacher=np.array([[0.5]]))
    return _anywhere("dp", example, "W* = 1/2, W = 0, γa = 1/2, γb = 1")


@_limit("Theorem D.1 (iii) without its condition", "DP (iii)", "W* = (2, 1)ᵀ, no matching; t ≤ 4")
def _double_any_teacher() -> Finding:
    """L_φ(t) < L_f(t) for every t > 0 and any W* ≠ 0."""
    ratio = loss_ratio(_DP, _F, [[2], [1]], np.linspace(0.02, 4, 200))
    title = "DP (iii): for other teachers φ can fall behind"
    return _fails_at(title, _DP, _F, {"W* = (2, 1)ᵀ": ratio})


@_limit(
    "Theorem 3.2 and D.2 (i), as printed", "OR (i)", "every parameter standard normal, c, d ≤ 4"
)
def _original_anywhere() -> Finding:
    """dL_ψ/dt ≤ dL_f/dt at any state with W_f = W_ψ, γ = β Norm(α)."""
    blocks = [np.array([[0, 0.5]]), np.array([1, 0.5]), np.array([0.5])]
    example = State(blocks, teacher=np.array([[0, 0.5]]))
    return _anywhere("or", example, "W* = W = (0, 1/2), α = (1, 1/2), β = 1/2")


@_limit(
    "Theorem D.2 (iii) without its condition",
    "OR (iii)",
    "W* = (8, 1) up to t = 4, W* = (4, 0.01) up to t = 12; not balanced",
)
def _original_any_teacher() -> Finding:
    """L_ψ(t) < L_f(t) for every t > 0 and any W* ≠ 0, d > 1."""
    counterexamples = {
        "W* = (8, 1)": loss_ratio(_OR, _F, [[8, 1]], np.linspace(0.02, 4, 200)),
        "W* = (4, 0.01)": loss_ratio(_OR, _F, [[4, 0.01]], np.linspace(0.01, 12, 600)),
    }
    return _fails_at("OR (iii): for other teachers ψ can fall behind", _OR, _F, counterexamples)


@_limit("Theorem 2.2 without W(0) = 0", "Theorem 1", "c = d = 1, W(0) = 1/2, W* = −1/2; t < 5")
def _nonzero_start() -> Finding:
    """L_f(t) < L_g(t) for every t > 0 from the same W(0), γ(0) = 1."""
    w = np.array([[0.5]])
    ratio = loss_ratio(
        _F,
        _G,
        [[-0.5]],
        TIMES[TIMES < 5],
        student_start=[w, np.ones(1)],
        baseline_start=[w],
    )
    return _fails_at("Theorem 1 needs W(0) = 0", _F, _G, {"W(0) = 1/2, W* = −1/2": ratio})
