"""Limits of the claims without the conditions of their proofs, with the smallest counterexamples.

These statements are expected to fail; one that holds is CONTRADICTED.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from lightning_sv.theory.claims.base import Advance, Claim, Finding, counted
from lightning_sv.theory.compare import FLOOR, MARGIN, TIMES, Curve, loss_ratio
from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import flow
from lightning_sv.theory.pairings import PAIRINGS
from lightning_sv.theory.panels import TIME, Line, Panel, ratio_panel
from lightning_sv.theory.students import STUDENTS

_F = STUDENTS["f"]
RANDOM_STATES = 20_000


def words(matrix: Array) -> str:
    """Format a small matrix or vector on one line: (8, 1) for a row, (2, 1)ᵀ for a column."""
    rows = np.atleast_2d(np.asarray(matrix, dtype=float))
    if rows.shape[1] == 1 and rows.shape[0] > 1:
        return words(rows.T) + "ᵀ"
    text = ["(" + ", ".join(f"{x:g}" for x in row) + ")" for row in rows]
    return text[0] if len(text) == 1 else "(" + ", ".join(text) + ")"


def _anywhere(name: str, symbol: str, shape: tuple[int, int], grid: Sequence[float], advance: Advance) -> Finding:
    pairing = PAIRINGS[name]
    rng = np.random.default_rng(0)
    guard, ratio, violated = np.empty((3, RANDOM_STATES))
    for k in range(RANDOM_STATES):
        state = pairing.random(rng)
        rates = pairing.rates(state)
        guard[k], ratio[k] = pairing.guard(state.blocks), rates.student / rates.standard
        violated[k] = rates.violates
        if k % 1000 == 0:
            advance(0.9 * k / RANDOM_STATES)
    share = float(violated.mean())
    found = pairing.smallest_violation(*shape, grid)
    smallest = "none on the grid"
    if found is not None:
        (blocks, teacher), rates = found
        smallest = (
            f"W* = {words(teacher)}, W = {words(blocks[0])}, scale parameters "
            f"{', '.join(words(block) for block in blocks[1:])}: {rates.student:g} against f's {rates.standard:g}"
        )
    some = np.arange(RANDOM_STATES) < 2000  # enough for a picture
    fast, slow = some & (violated == 0), some & (violated > 0)
    panel = Panel(
        f"{name.upper()} (i): off the trajectory {symbol} can be slower",
        f"{pairing.guard_name} of the state",
        f"$(dL_{{{symbol}}}/dt) \\,/\\, (dL_f/dt)$",
        [
            Line("at least as fast", guard[fast], ratio[fast], marks=True, colour="blue"),
            Line(f"slower: {share:.0%} of all", guard[slow], ratio[slow], marks=True, colour="vermillion"),
        ],
        scale="xy",
        level=1.0,
        limits=(0.03, 300),
    )
    safe = int(violated[guard >= 1].sum())
    note = f"share of {RANDOM_STATES:,} random states that violate it ({safe} of them guarded); smallest: {smallest}"
    error = float(np.sqrt(share * (1 - share) / RANDOM_STATES))
    return Finding(0.0, share, error, share == 0 and found is None, note, (panel,))


def whole_number_search(name: str, column: bool, largest: int, advance: Advance) -> list[tuple[Array, Curve]]:
    """Return loss ratios of all teachers (a, b), 1 ≤ b ≤ a ≤ largest, by increasing norm.

    Signs and order of the entries do not matter: all flows are equivariant under them. Rows (a, a) are omitted,
    because they are balanced.
    """
    pairs = sorted(
        ((a, b) for a in range(1, largest + 1) for b in range(1, a + column)), key=lambda p: p[0] ** 2 + p[1] ** 2
    )
    found = []
    for pair in counted(pairs, advance):
        teacher = np.array([pair], dtype=float)
        teacher = teacher.T if column else teacher
        found.append((teacher, loss_ratio(STUDENTS[name], _F, teacher, np.linspace(0.02, 4, 200))))
    return found


def _any_teacher(name: str, symbol: str, column: bool, largest: int, also: Array, advance: Advance) -> Finding:
    searched = whole_number_search(name, column, largest, advance)
    failing = [(teacher, curve) for teacher, curve in searched if curve.peak[0] > 1 + MARGIN]
    other = loss_ratio(STUDENTS[name], _F, also, np.linspace(0.01, 12, 600))
    holding = [(teacher, curve) for teacher, curve in searched if curve.peak[0] <= 1 + MARGIN]
    lines = [Line(f"W* = {words(teacher)}", *curve) for teacher, curve in [*holding[:1], *failing[:3]]]
    lines.append(Line(f"W* = {words(also)}", *other))
    title = f"{name.upper()} (iii): for other teachers {symbol} can fall behind"
    panel = ratio_panel(title, symbol, "f", lines, (0.05, 20))
    if not failing:
        return Finding("< 1", max(c.peak[0] for _, c in searched), None, other.peak[0] < 1, "", (panel,))
    teacher, curve = failing[0]
    note = (
        f"{len(failing)} of {len(searched)} whole-number teachers fail; smallest {words(teacher)}: "
        f"{_course(curve)}; smaller in norm {words(also)}: {_course(other)}"
    )
    return Finding("< 1", curve.peak[0], None, False, note, (panel, _decay_panel(name, symbol, teacher)))


def _decay_panel(name: str, symbol: str, teacher: Array) -> Panel:
    """Plot the decay rate of the residual, −½ d log L / dt: the slower final direction falls behind."""
    times = np.linspace(0.02, 3.5, 120)
    lines = []
    for key, label in (("f", "f"), (name, symbol)):
        run = flow(STUDENTS[key], teacher, times)
        rates = np.array([-STUDENTS[key].rate(state, teacher) for state in run.states]) / (2 * run.loss)
        alive = run.loss > FLOOR * run.loss[0]
        lines.append(Line(label, times[alive], rates[alive]))
    title = f"W* = {words(teacher)}: who shrinks faster when"
    return Panel(title, TIME, r"$-\frac{1}{2}\, d\log L / dt$, per unit of t", lines)


def _course(curve: Curve) -> str:
    ratio, at = curve.peak
    end = ", still rising where the losses meet rounding" if at == curve.times[-1] else ""
    return f"above 1 from t = {curve.first_above(1 + MARGIN):.2f}, {ratio:.2f} at t = {at:.2f}{end}"


def _nonzero_start(advance: Advance) -> Finding:
    steps = np.arange(1, 5) / 2
    targets = np.concatenate([steps, -steps])
    cases = sorted(((w, target) for w in steps for target in targets), key=lambda case: case[0] + abs(case[1]))
    failing: list[tuple[float, float, Curve]] = []
    for w, target in counted(cases, advance):
        start = np.array([[w]])
        if w != target:
            curve = loss_ratio(_F, STUDENTS["g"], [[target]], TIMES[TIMES < 5], initial=([start, np.ones(1)], [start]))
            if curve.peak[0] > 1 + MARGIN:
                failing.append((w, target, curve))
    lines = [Line(f"W(0) = {w:g}, W* = {target:g}", *curve) for w, target, curve in failing[:4]]
    panel = ratio_panel("Theorem 1 needs W(0) = 0", "f", "g", lines, (0.01, 100))
    if not failing:
        return Finding("< 1", 0.0, None, True, "", (panel,))
    w, target, curve = failing[0]
    note = f"{len(failing)} of {len(cases)} scalar cases fail; smallest W(0) = {w:g}, W* = {target:g}: {_course(curve)}"
    return Finding("< 1", curve.peak[0], None, False, note, (panel,))


def _limit(part: str, source: str, statement: str, conditions: str, check: Callable[[Advance], Finding]) -> Claim:
    return Claim("limits", part, source, statement, conditions, check, "fails")


CLAIMS = (
    _limit(
        "DP (i)",
        "Theorem 3.1 and D.1 (i), as printed",
        "dL_φ/dt ≤ dL_f/dt at any state with γ = γb, W_f = diag(γa) W_φ",
        "every parameter standard normal, c, d ≤ 4",
        partial(_anywhere, "dp", "φ", (1, 1), (0.0, 0.5, 1.0, 1.5, 2.0, -0.5, -1.0)),
    ),
    _limit(
        "DP (iii)",
        "Theorem D.1 (iii) without its condition",
        "L_φ(t) < L_f(t) for every t > 0 and any W* ≠ 0",
        "W* = (a, b)ᵀ, whole numbers up to 7, no matching; t ≤ 4",
        partial(_any_teacher, "dp", "φ", True, 7, np.array([[1], [0.5]])),
    ),
    _limit(
        "OR (i)",
        "Theorem 3.2 and D.2 (i), as printed",
        "dL_ψ/dt ≤ dL_f/dt at any state with W_f = W_ψ, γ = β Norm(α)",
        "every parameter standard normal, c, d ≤ 4",
        partial(_anywhere, "or", "ψ", (1, 2), (0.0, 0.5, 1.0, 2.0, -1.0)),
    ),
    _limit(
        "OR (iii)",
        "Theorem D.2 (iii) without its condition",
        "L_ψ(t) < L_f(t) for every t > 0 and any W* ≠ 0, d > 1",
        "W* = (a, b), whole numbers up to 10, not balanced; t ≤ 4",
        partial(_any_teacher, "or", "ψ", False, 10, np.array([[4, 0.01]])),
    ),
    _limit(
        "Theorem 1",
        "Theorem 2.2 without W(0) = 0",
        "L_f(t) < L_g(t) for every t > 0 from the same W(0), γ(0) = 1",
        "c = d = 1, W(0) and W* multiples of 1/2 up to 2",
        _nonzero_start,
    ),
)
