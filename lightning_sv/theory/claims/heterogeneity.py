"""HG: a scale vector per branch, and when it is slower or faster than a shared one."""

from fractions import Fraction

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, Panel, claim, ratio_panel
from lightning_sv.theory.claims.shared_checks import early, throughout
from lightning_sv.theory.flow import MARGIN, Curve, loss_ratio
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import STUDENTS, TEACHERS, branch_of

_F, _HG = STUDENTS["f"], STUDENTS["hg"]
#: relative difference of small losses that are equal by symmetry
EQUAL = 1e-3
_START = "W(0) = 0, γ = γ_k = 1 at t = 0; two branches, each half of the rows"


def by_branch(matrix: Array) -> Array:
    """Return the sum of each column over the rows of each branch: (c, d) -> (branches, d)."""
    branch = branch_of(matrix.shape[0])
    return np.stack([matrix[branch == k].sum(0) for k in range(branch[-1] + 1)])


def stated_coefficient(teacher: Array) -> Fraction:
    """Return (2/3) Σ_j [(Σ_k s_kj)² − Σ_k s_kj²] >= 0, s_kj = ‖column j of branch k of W*‖²; teacher in Fractions."""
    squares = by_branch(teacher * teacher)
    return Fraction(2, 3) * Fraction((squares.sum(0) ** 2).sum() - (squares**2).sum())


@claim("hg", "Section 3.1; ours", "(i)", "any state with γ_1 = γ_2 = γ")
def _at_an_instant() -> Finding:
    """dL_HG/dt − dL_f/dt = Σ_j [(Σ_k p_kj)² − Σ_k p_kj²], p_k = −∂L/∂γ_k: HG is faster where branches disagree."""
    rng = np.random.default_rng(0)
    worst, wrong, cross_terms, ratios = 0.0, 0, [], []
    count = 2000
    for _ in range(count):
        c, d = (int(n) for n in rng.integers(2, 5, 2))
        w, teacher, gamma = rng.standard_normal((c, d)), rng.standard_normal((c, d)), rng.standard_normal(d)
        pull = by_branch(w * (teacher - w * gamma))  # −∂L/∂γ_kj
        cross = float((pull.sum(0) ** 2).sum() - (pull**2).sum())
        ours, theirs = _HG.rate([w, np.stack([gamma, gamma])], teacher), _F.rate([w, gamma], teacher)
        worst = max(worst, abs(ours - theirs - cross) / (1 + abs(theirs)))
        wrong += (ours < theirs) != (cross < 0)
        cross_terms.append(cross / -theirs)
        ratios.append(ours / theirs)
    ahead = float(np.mean(np.array(ratios) > 1))
    panel = Panel(
        "(i) HG is the faster where branches pull γ apart",
        "cross terms of the branches / $|dL_f/dt|$",
        "$(dL_{HG}/dt) \\,/\\, (dL_f/dt)$",
        [Line("random states", cross_terms[:1000], ratios[:1000], marks=True)],
        level=1.0,
    )
    note = f"{count} random states, HG faster in {ahead:.0%}; {wrong} against the sign of the cross terms"
    return Finding(0.0, worst, worst, worst < 1e-12 and not wrong, note, (panel,))


@claim("hg", "ours, as Theorem D.1 (ii)", "(ii)", _START)
def _early() -> Finding:
    """L_HG − L_f = +(2/3) Σ_j [(Σ_k ‖w*_kj‖²)² − Σ_k ‖w*_kj‖⁴] t³ + O(t⁴): HG is the slower."""
    return early("hg", stated_coefficient)


@claim("hg", "ours", "(iii)", f"{_START}; two branches share a column of W*")
def _throughout() -> Finding:
    """L_f(t) < L_HG(t) for every t > 0: rate √(1 + 4‖a_j‖²) of whole columns against √(1 + 4‖a_kj‖²)."""
    teachers = [teacher for teacher in TEACHERS if stated_coefficient(teacher.matrix) > 0]
    return throughout("f", "hg", "(iii) f stays below HG: branches share an input", teachers)


@claim(
    "hg", 'Section 3.1: separate vectors let "the induced preconditioners adapt"', "faster", _START, expected="fails"
)
def _ahead() -> Finding:
    """L_HG(t) < L_f(t) for some W* and t > 0."""
    curves = [loss_ratio(_HG, _F, teacher.matrix) for teacher in TEACHERS]
    behind = sum(curve.peak[0] > 1 + EQUAL for curve in curves)
    least = min(float(curve.values.min()) for curve in curves)
    note = (
        f"least L_HG / L_f of {len(TEACHERS)} teachers; behind for {behind}, equal for the others: a shared γ is moved "
        "by every branch, P = γ² I + wwᵀ grows with each; what HG gains in training is not this mechanism from W(0) = 0"
    )
    return Finding("< 1", least, None, least < 1 - EQUAL, note)


def _course(a: float, b: float) -> Curve:
    """Return L_HG / L_f from W(0) = (a, b)ᵀ to W* = (2a, b/2)ᵀ."""
    start = np.array([[a], [b]])
    blocks = ([start, np.ones((2, 1))], [start, np.ones(1)])
    return loss_ratio(_HG, _F, np.array([[2 * a], [b / 2]]), np.linspace(0.02, 4, 200), initial=blocks)


@claim("hg", "Section 3.1, Figure 4; ours", "W(0) ≠ 0", "d = 1, W(0) from 1/2 to 2, γ = 1; t ≤ 4", expected="fails")
def _grow_and_shrink() -> Finding:
    """L_HG(t) < L_f(t) for every t where one branch doubles and one halves."""
    grid = (0.5, 1.0, 1.5, 2.0)
    curves = {(a, b): _course(a, b) for a in grid for b in grid}
    shown = ((0.5, 0.5), (0.5, 2.0), (1.0, 1.0), (2.0, 0.5), (2.0, 2.0))
    lines = [Line(f"W(0) = ({a:g}, {b:g})ᵀ", *curves[a, b]) for a, b in shown]
    panel = ratio_panel("One branch doubles, one halves: HG and f", "HG", "f", lines, (1e-3, 1e3))
    share = float(np.mean([curve.peak[0] < 1 - MARGIN for curve in curves.values()]))
    first = np.mean([curve.values[0] < 1 for curve in curves.values()])
    note = f"share of {len(curves)} starts where HG stays ahead up to t = 4; ahead at first in {first:.0%}"
    return Finding(1.0, share, None, share == 1, note, (panel,))
