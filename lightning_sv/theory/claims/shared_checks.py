"""Checks shared by several theorems: (i) at an instant, (ii) early, (iii) throughout.

The proofs of (i) use more than the statements: γa_i² ≥ 1 (DP) and ρ ≥ 1 (OR), which the standard
initialization preserves and a state off the trajectory may violate. `guard` is that number.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from lightning_sv.theory.claims.base import TIME, Finding, Line, Panel, ratio_panel
from lightning_sv.theory.flow import (
    FLOOR,
    TIMES,
    difference_series,
    flow,
    loss_ratio,
    starts_below,
)
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import (
    STUDENTS,
    TEACHERS,
    Student,
    Teacher,
    named_teacher,
    original_space,
)

_F = STUDENTS["f"]


class State(NamedTuple):
    """Parameters of a student, and the teacher."""

    blocks: list[Array]
    teacher: Array


class Rates(NamedTuple):
    """Guard of some states, and dL/dt of a student and of the standard model f there.

    Each has shape (N,).
    """

    guard: Array
    student: Array
    standard: Array

    @property
    def violated(self) -> Array:
        """True if dL_student/dt ≤ dL_f/dt ≤ 0 is violated, beyond rounding."""
        margin = 1e-12 * (1 + np.abs(self.standard))
        return np.asarray((self.student > self.standard + margin) | (self.standard > 0))


class Pairing(NamedTuple):
    """A student, and the parameters of f with the same effective matrix and the same γ."""

    student: Student
    guard_name: str
    #: function from the student's parameters to (W, γ) of f
    standard: Callable[[list[Array]], list[Array]]
    #: function from the student's parameters to the number that must be at least 1 in the proof
    guard: Callable[[list[Array]], float]

    def rates(self, states: Sequence[State]) -> Rates:
        """Return the guard and dL/dt of both at every state."""
        rows = [
            (
                self.guard(blocks),
                self.student.rate(blocks, teacher),
                _F.rate(self.standard(blocks), teacher),
            )
            for blocks, teacher in states
        ]
        return Rates(*np.array(rows).T)

    def random(self, rng: np.random.Generator) -> State:
        """Return a random state: parameters and teacher standard normal, c and d from 1 to 4."""
        c, d = (int(n) for n in rng.integers(1, 5, 2))
        blocks = [rng.standard_normal(block.shape) for block in self.student.initial(c, d)]
        return State(blocks, rng.standard_normal((c, d)))

    def panel(self, title: str, lines: Sequence[Line], **limits: tuple[float, float]) -> Panel:
        """Return log-log axes for the ratio of the rates as a function of the guard."""
        ratio = f"$(dL_{{{self.student.name}}}/dt) \\,/\\, (dL_f/dt)$"
        return Panel(
            title, f"{self.guard_name} of the state", ratio, lines, scale="xy", level=1.0, **limits
        )


PAIRINGS = {
    # DP (i): γ = γb and W_f = diag(γa) W_φ
    "dp": Pairing(
        STUDENTS["dp"],
        "min γa²",
        lambda blocks: [blocks[1][:, None] * blocks[0], blocks[2]],
        lambda blocks: float((blocks[1] ** 2).min()),
    ),
    # OR (i): W_f = W_ψ and γ = β Norm(α); ρ is the weight of the preconditioner across γ
    "or": Pairing(
        STUDENTS["or"],
        "ρ = β²d/‖α‖²",
        lambda blocks: [blocks[0], original_space(*blocks[1:])],
        lambda blocks: float(blocks[2][0] ** 2 / (blocks[1] * blocks[1]).mean()),
    ),
}


def at_an_instant(name: str) -> Finding:
    """Check (i) on the student's trajectory, and off it if the guard of the proof is at least 1."""
    pairing = PAIRINGS[name]
    rng = np.random.default_rng(0)
    on = _states_on_trajectories(pairing.student, rng)
    off = _guarded_states(pairing, rng)
    violations = 0
    lines = []
    for label, colour, states in (
        ("off the trajectory, guarded", "orange", off),
        ("on the trajectory", "blue", on),
    ):
        rates = pairing.rates(states)
        violations += int(rates.violated.sum())
        moving = rates.standard < -1e-12
        ratio = rates.student[moving] / rates.standard[moving]
        lines.append(Line(label, rates.guard[moving], ratio, marks=True, colour=colour))
    panel = pairing.panel(
        f"(i) {pairing.student.name} descends at least as fast as f",
        lines,
        limits=(0.8, 1.5 * max(np.quantile(line.y, 0.999) for line in lines)),
        x_limits=(0.8, 1.5 * max(np.quantile(line.x, 0.99) for line in lines)),
    )
    least = min(np.min(line.y) for line in lines)
    note = f"{violations} violations in {len(on)} states on and {len(off)} off the trajectory; "
    note += f"least ratio {least:.6f}"
    return Finding(0.0, violations, None, violations == 0, note, (panel,))


def _states_on_trajectories(student: Student, rng: np.random.Generator) -> list[State]:
    """Return 20 states of each of 40 flows to random teachers, c and d from 1 to 4."""
    times = np.linspace(0.05, 3, 20)
    states: list[State] = []
    for _ in range(40):
        teacher = rng.standard_normal(rng.integers(1, 5, 2))
        states += [State(blocks, teacher) for blocks in flow(student, teacher, times).states]
    return states


def _guarded_states(pairing: Pairing, rng: np.random.Generator) -> list[State]:
    """Return 2,000 random states whose guard is at least 1."""
    states: list[State] = []
    while len(states) < 2000:
        state = pairing.random(rng)
        if pairing.guard(state.blocks) >= 1:
            states.append(state)
    return states


def early(name: str, stated: Callable[[Array], Fraction]) -> Finding:
    """Check (ii): the coefficient of t³ from exact power series is the paper's for all teachers.

    Teachers are in Fractions.
    """
    student = STUDENTS[name]
    errors = []
    starts_at_t3 = True
    for teacher in TEACHERS:
        *lower_terms, t3 = difference_series(student, _F, teacher, 3)
        starts_at_t3 = starts_at_t3 and not any(lower_terms)
        errors.append(abs(t3 - stated(teacher.matrix)))
    is_exact = starts_at_t3 and not any(errors)

    shown = named_teacher("full 2×3").matrix
    *_, t3, t4 = difference_series(student, _F, shown, 4)
    note = (
        f"exact in all of {len(TEACHERS)} teachers, shown for 2×3; t⁴ / t³ = {float(t4 / t3):.2f}"
    )
    panels = (_early_panel(name, stated),)
    return Finding(float(stated(shown)), float(t3), float(max(errors)), is_exact, note, panels)


def _early_panel(name: str, stated: Callable[[Array], Fraction]) -> Panel:
    """Plot the differences of five teachers over their stated terms, if these are not 0."""
    student = STUDENTS[name]
    times = np.geomspace(0.01, 0.5, 60)
    with_term = [teacher for teacher in TEACHERS if stated(teacher.matrix)]
    lines = []
    for teacher in with_term[:5]:
        term = float(stated(teacher.matrix)) * times**3
        difference = flow(student, teacher, times).loss - flow(_F, teacher, times).loss
        lines.append(Line(teacher.name, times, difference / term))
    return Panel(
        "(ii) Early on they differ by the stated t³ term",
        TIME,
        f"$(L_{{{student.name}}} - L_f)$ / (stated coefficient · t³)",
        lines,
        scale="x",
        level=1.0,
        limits=(0, 1.15),
    )


def throughout(
    name: str, baseline_name: str, title: str, teachers: Sequence[Teacher] = TEACHERS
) -> Finding:
    """Check (iii): the student's loss stays below the baseline's for all teachers.

    The teachers satisfy the condition. Just after t = 0 the check is exact; afterwards it has the
    precision of integrated losses.
    """
    student = STUDENTS[name]
    baseline = STUDENTS[baseline_name]
    all_below = True
    ratios = []
    for teacher in teachers:
        ratio = loss_ratio(student, baseline, teacher)
        all_below = all_below and starts_below(student, baseline, teacher) and ratio.stays_below_one
        ratios.append(ratio)
    shown = zip(teachers[:6], ratios[:6], strict=True)
    lines = [Line(teacher.name, *ratio) for teacher, ratio in shown]
    panel = ratio_panel(title, student.name, baseline.name, lines, (1e-6, 3))
    note = (
        f"{len(teachers)} teachers; just after t = 0 by exact series, "
        f"then until t = {TIMES[-1]:g} or "
        f"L_{baseline.name} is {FLOOR:g} of ½‖W*‖², whichever comes first"
    )
    largest = max(ratio.largest for ratio in ratios)
    return Finding("< 1", largest, None, all_below, note, (panel,))
