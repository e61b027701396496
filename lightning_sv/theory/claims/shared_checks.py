"""Parts shared by the theorems of DP and OR: (i) at an instant, (ii) early, (iii) throughout."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from lightning_sv.theory.claims.base import Advance, Finding, counted
from lightning_sv.theory.compare import FLOOR, TIMES, difference_series, stays_below
from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import flow
from lightning_sv.theory.pairings import PAIRINGS, State
from lightning_sv.theory.panels import TIME, Colour, Line, Panel, ratio_panel
from lightning_sv.theory.students import STUDENTS, exact
from lightning_sv.theory.teachers import TEACHERS, Teacher

_F = STUDENTS["f"]
#: above this time, the next terms of the series exceed the first
FIT_UNTIL = 0.08


def at_an_instant(name: str, symbol: str, advance: Advance) -> Finding:
    """Check (i) on the student's trajectory, and off it if the guard of the proof is at least 1."""
    pairing = PAIRINGS[name]
    rng = np.random.default_rng(0)
    on: list[State] = []
    for k in range(40):
        on += pairing.on_trajectory(rng, np.linspace(0.05, 3, 20).tolist())
        advance(k / 80)
    off: list[State] = []
    while len(off) < 2000:
        state = pairing.random(rng)
        if pairing.guard(state.blocks) >= 1:
            off.append(state)
            advance(0.5 + len(off) / 4000)
    lines, violations, least = [], 0, np.inf
    sets: list[tuple[str, list[State], Colour]] = [
        ("off the trajectory, guarded", off, "orange"),
        ("on the trajectory", on, "blue"),
    ]
    for label, states, colour in sets:
        rates = [pairing.rates(state) for state in states]
        violations += sum(rate.violates for rate in rates)
        ratio = [r.student / r.standard for r in rates if r.standard < -1e-12]
        guard = [pairing.guard(s.blocks) for s, r in zip(states, rates, strict=True) if r.standard < -1e-12]
        least = min(least, *ratio)
        lines.append(Line(label, guard, ratio, marks=True, colour=colour))
    panel = Panel(
        f"(i) {symbol} descends at least as fast as f",
        f"{pairing.guard_name} of the state",
        f"$(dL_{{{symbol}}}/dt) \\,/\\, (dL_f/dt)$",
        lines,
        scale="xy",
        level=1.0,
        limits=(0.8, 1.5 * max(np.quantile(line.y, 0.999) for line in lines)),
        x_limits=(0.8, 1.5 * max(np.quantile(line.x, 0.99) for line in lines)),
    )
    note = f"{violations} violations in {len(on)} states on and {len(off)} off the trajectory; least ratio {least:.6f}"
    return Finding(0.0, violations, None, violations == 0, note, (panel,))


def rational_teachers(count: int, seed: int = 0) -> list[Array]:
    """Return random teachers with entries k/4, c and d from 1 to 3."""
    rng = np.random.default_rng(seed)
    teachers: list[Array] = []
    while len(teachers) < count:
        whole = rng.integers(-8, 9, rng.integers(1, 4, 2))
        if whole.any():
            teachers.append(exact(whole) / 4)
    return teachers


def ode_fit(name: str, teacher: Array) -> float:
    """Fit the coefficient of t³ in L_student − L_f to integrated flows below `FIT_UNTIL`, without series."""
    times = np.linspace(0.004, FIT_UNTIL, 40)
    losses = [flow(STUDENTS[key], teacher, times).loss for key in (name, "f")]
    scaled = times / FIT_UNTIL
    powers = np.stack([scaled**k for k in range(3, 10)], axis=-1)
    solution = np.linalg.lstsq(powers, losses[0] - losses[1], rcond=None)[0]
    return float(solution[0] / FIT_UNTIL**3)


def early(name: str, symbol: str, stated: Callable[[Array], Fraction], advance: Advance) -> Finding:
    """Check (ii): the coefficient of t³ from exact power series equals the paper's formula.

    Args:
        name: name of the student
        symbol: its letter in the paper
        stated: the paper's coefficient for a teacher in Fractions
        advance: progress function of the completed fraction
    """
    matrices = [*(teacher.matrix for teacher in TEACHERS), *rational_teachers(12)]
    errors, lower = [], True
    for matrix in counted(matrices, advance):
        series = difference_series(STUDENTS[name], _F, matrix, 3)
        lower = lower and not any(series[:3])
        errors.append(abs(series[3] - stated(matrix)))
    shown = next(teacher for teacher in TEACHERS if teacher.name == "full 2×3").matrix
    series = difference_series(STUDENTS[name], _F, shown, 4)
    fitted = ode_fit(name, shown)
    relative = abs(fitted / float(series[3]) - 1)
    times = np.geomspace(0.01, 0.5, 60)
    lines: list[Line] = []
    for teacher in TEACHERS:
        coefficient = float(stated(teacher.matrix))
        if coefficient and len(lines) < 5:
            losses = [flow(STUDENTS[key], teacher.matrix, times).loss for key in (name, "f")]
            lines.append(Line(teacher.name, times, (losses[0] - losses[1]) / (coefficient * times**3)))
    panel = Panel(
        "(ii) Early on they differ by the stated t³ term",
        TIME,
        f"$(L_{{{symbol}}} - L_f)$ / (stated coefficient · t³)",
        lines,
        scale="x",
        level=1.0,
        limits=(0, 1.15),
    )
    note = (
        f"exact in all of {len(matrices)} teachers, shown for 2×3; the fit of the integrated flows below "
        f"t = {FIT_UNTIL} is off by {relative:.0e}; t⁴ / t³ = {float(series[4] / series[3]):.2f}"
    )
    worst = float(max(errors))
    agrees = worst <= 1e-6 and lower and relative < 1e-4
    return Finding(float(stated(shown)), float(series[3]), worst, agrees, note, (panel,))


def throughout(
    name: str, symbol: str, word: str, condition: Callable[[Teacher], bool], behind: tuple[str, str], advance: Advance
) -> Finding:
    """Check (iii): the ratio of losses stays below 1 for teachers that satisfy the condition.

    Args:
        name: name of the student
        symbol: its letter in the paper
        word: name of the condition, for the title
        condition: condition on the teacher
        behind: name and letter of the student that is slower
        advance: progress function of the completed fraction
    """
    baseline, other = STUDENTS[behind[0]], behind[1]
    teachers = [teacher for teacher in TEACHERS if condition(teacher)]
    below, lines, worst = [], [], 0.0
    for teacher in counted(teachers, advance):
        holds, curve = stays_below(STUDENTS[name], baseline, teacher.matrix)
        below.append(holds)
        worst = max(worst, curve.peak[0])
        lines.append(Line(teacher.name, *curve))
    panel = ratio_panel(f"(iii) {symbol} stays below {other}: {word}", symbol, other, lines, (1e-6, 3))
    note = (
        f"{len(teachers)} teachers; just after t = 0 by exact series, then until t = {TIMES[-1]:g} or L_{other} is "
        f"{FLOOR:g} of ½‖W*‖², whichever comes first"
    )
    return Finding("< 1", worst, None, all(below), note, (panel,))
