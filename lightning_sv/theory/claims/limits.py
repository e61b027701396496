"""Limits of the claims without the conditions of their proofs, with counterexamples.

These statements are expected to fail; one that holds is CONTRADICTED.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from lightning_sv.theory.claims.base import TIME, Finding, Line, Panel, claim, ratio_panel
from lightning_sv.theory.claims.shared_checks import PAIRINGS, State
from lightning_sv.theory.flow import FLOOR, TIMES, LossRatio, flow, loss_ratio
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import STUDENTS, Student

_limit = partial(claim, "limits", expected="fails")
_F = STUDENTS["f"]
RANDOM_STATES = 20_000


def words(matrix: Array) -> str:
    """Format a small matrix or vector on one line: (8, 1) for a row, (2, 1)ᵀ for a column."""
    rows = np.atleast_2d(np.asarray(matrix, dtype=float))
    if rows.shape[1] == 1 and rows.shape[0] > 1:
        return words(rows.T) + "ᵀ"
    texts = [_in_parentheses(map("{:g}".format, row)) for row in rows]
    if len(texts) == 1:
        return texts[0]
    return _in_parentheses(texts)


def _in_parentheses(texts: Iterable[str]) -> str:
    return f"({', '.join(texts)})"


def _anywhere(name: str, example: State) -> Finding:
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
    w, *scales = example.blocks
    at_example = pairing.rates([example])
    note = (
        f"share of {RANDOM_STATES:,} random states that violate it ({guarded} of them guarded); "
        f"for example W* = {words(example.teacher)}, W = {words(w)}, scale parameters "
        f"{', '.join(map(words, scales))}: {at_example.student[0]:g} against f's "
        f"{at_example.standard[0]:g}"
    )
    error = float(np.sqrt(share * (1 - share) / RANDOM_STATES))
    return Finding(0.0, share, error, share == 0, note, (panel,))


class _TeacherCase(NamedTuple):
    """A teacher, and L_student / L_f on the way to it."""

    teacher: Array
    ratio: LossRatio


def _any_teacher(name: str, largest: int, smaller_example: Array) -> Finding:
    """Search all teachers (a, b), 1 ≤ b ≤ a ≤ largest, by increasing norm.

    They have the shape of `smaller_example`, a counterexample of smaller norm whose entries are not
    whole numbers. Signs and order of the entries do not matter, because all flows are equivariant
    under them.
    """
    student = STUDENTS[name]
    holding: list[_TeacherCase] = []
    failing: list[_TeacherCase] = []
    for teacher in _whole_number_teachers(largest, smaller_example.shape):
        ratio = loss_ratio(student, _F, teacher, np.linspace(0.02, 4, 200))
        cases = failing if ratio.exceeds_one else holding
        cases.append(_TeacherCase(teacher, ratio))
    if not failing:
        return _without_counterexample([case.ratio for case in holding])

    longer = np.linspace(0.01, 12, 600)
    smaller = _TeacherCase(smaller_example, loss_ratio(student, _F, smaller_example, longer))
    shown = [*holding[:1], *failing[:3], smaller]
    lines = [Line(f"W* = {words(case.teacher)}", *case.ratio) for case in shown]
    title = f"{name.upper()} (iii): for other teachers {student.name} can fall behind"
    panel = ratio_panel(title, student.name, "f", lines, (0.05, 20))
    first = failing[0]
    n_searched = len(failing) + len(holding)
    note = (
        f"{len(failing)} of {n_searched} whole-number teachers fail; "
        f"smallest {words(first.teacher)}: {_describe(first.ratio)}; "
        f"smaller in norm {words(smaller.teacher)}: {_describe(smaller.ratio)}"
    )
    panels = (panel, _decay_panel(student, first.teacher))
    return Finding("< 1", first.ratio.largest, None, agrees=False, note=note, panels=panels)


def _without_counterexample(ratios: Sequence[LossRatio]) -> Finding:
    """Return the finding of a limit that no case shows: its statement holds."""
    largest = max(ratio.largest for ratio in ratios)
    note = f"none of {len(ratios)} cases fails"
    return Finding("< 1", largest, None, agrees=True, note=note)


def _whole_number_teachers(largest: int, shape: tuple[int, ...]) -> list[Array]:
    """Return the teachers (a, b), 1 ≤ b ≤ a ≤ largest, by increasing norm.

    Rows lack (a, a), because they are balanced, so that OR (iii) holds for them.
    """
    is_row = shape[0] == 1
    pairs = []
    for a in range(1, largest + 1):
        for b in range(1, a + 1):
            is_balanced = is_row and a == b
            if not is_balanced:
                pairs.append((a, b))
    pairs.sort(key=lambda pair: pair[0] ** 2 + pair[1] ** 2)
    return [np.array(pair, dtype=float).reshape(shape) for pair in pairs]


def _decay_panel(student: Student, teacher: Array) -> Panel:
    """Plot the decay rate of the residual, −½ d log L / dt.

    The slower final direction falls behind.
    """
    times = np.linspace(0.02, 3.5, 120)
    lines = []
    for each in (_F, student):
        run = flow(each, teacher, times)
        rates = np.array([-each.rate(state, teacher) for state in run.states]) / (2 * run.loss)
        alive = run.loss > FLOOR * run.loss[0]
        lines.append(Line(each.name, times[alive], rates[alive]))
    title = f"W* = {words(teacher)}: who shrinks faster when"
    return Panel(title, TIME, r"$-\frac{1}{2}\, d\log L / dt$, per unit of t", lines)


def _describe(ratio: LossRatio) -> str:
    """Return the time from which a ratio is above 1, and its largest value, as text."""
    at = ratio.time_of_largest
    end = ", still rising where the losses meet rounding" if at == ratio.times[-1] else ""
    return f"above 1 from t = {ratio.first_above(1):.2f}, {ratio.largest:.2f} at t = {at:.2f}{end}"


@_limit(
    "Theorem 3.1 and D.1 (i), as printed", "DP (i)", "every parameter standard normal, c, d ≤ 4"
)
def _double_anywhere() -> Finding:
    """dL_φ/dt ≤ dL_f/dt at any state with γ = γb, W_f = diag(γa) W_φ."""
    blocks = [np.zeros((1, 1)), np.array([0.5]), np.ones(1)]
    return _anywhere("dp", State(blocks, teacher=np.array([[0.5]])))


@_limit(
    "Theorem D.1 (iii) without its condition",
    "DP (iii)",
    "W* = (a, b)ᵀ, whole numbers up to 7, no matching; t ≤ 4",
)
def _double_any_teacher() -> Finding:
    """L_φ(t) < L_f(t) for every t > 0 and any W* ≠ 0."""
    return _any_teacher("dp", 7, np.array([[1], [0.5]]))


@_limit(
    "Theorem 3.2 and D.2 (i), as printed", "OR (i)", "every parameter standard normal, c, d ≤ 4"
)
def _original_anywhere() -> Finding:
    """dL_ψ/dt ≤ dL_f/dt at any state with W_f = W_ψ, γ = β Norm(α)."""
    blocks = [np.array([[0, 0.5]]), np.array([1, 0.5]), np.array([0.5])]
    return _anywhere("or", State(blocks, teacher=np.array([[0, 0.5]])))


@_limit(
    "Theorem D.2 (iii) without its condition",
    "OR (iii)",
    "W* = (a, b), whole numbers up to 10, not balanced; t ≤ 4",
)
def _original_any_teacher() -> Finding:
    """L_ψ(t) < L_f(t) for every t > 0 and any W* ≠ 0, d > 1."""
    return _any_teacher("or", 10, np.array([[4, 0.01]]))


@_limit(
    "Theorem 2.2 without W(0) = 0", "Theorem 1", "c = d = 1, W(0) and W* multiples of 1/2 up to 2"
)
def _nonzero_start() -> Finding:
    """L_f(t) < L_g(t) for every t > 0 from the same W(0), γ(0) = 1."""
    cases = _scalar_cases()
    failing = [case for case in cases if case.ratio.exceeds_one]
    if not failing:
        return _without_counterexample([case.ratio for case in cases])

    lines = [Line(case.label, *case.ratio) for case in failing[:4]]
    panel = ratio_panel("Theorem 1 needs W(0) = 0", "f", "g", lines, (0.01, 100))
    first = failing[0]
    note = (
        f"{len(failing)} of {len(cases)} scalar cases fail; "
        f"smallest {first.label}: {_describe(first.ratio)}"
    )
    return Finding("< 1", first.ratio.largest, None, agrees=False, note=note, panels=(panel,))


class _ScalarCase(NamedTuple):
    """Scalar W(0) and W*, and L_f / L_g from there."""

    start: float
    target: float
    ratio: LossRatio

    @property
    def label(self) -> str:
        """W(0) and W* as text."""
        return f"W(0) = {self.start:g}, W* = {self.target:g}"


def _scalar_cases() -> list[_ScalarCase]:
    """Return all cases, by |W(0)| + |W*|.

    Starts at the teacher are left out, because both losses are 0. Negative starts mirror positive
    ones.
    """
    steps = np.arange(1, 5) / 2
    targets = np.concatenate([steps, -steps])
    times = TIMES[TIMES < 5]
    cases = []
    for start, target in product(steps, targets):
        if start == target:
            continue
        w = np.array([[start]])
        ratio = loss_ratio(
            _F,
            STUDENTS["g"],
            [[target]],
            times,
            student_start=[w, np.ones(1)],
            baseline_start=[w],
        )
        cases.append(_ScalarCase(start, target, ratio))
    return sorted(cases, key=lambda case: case.start + abs(case.target))
