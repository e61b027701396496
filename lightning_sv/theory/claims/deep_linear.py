"""Comparison with two-layer deep linear networks.

Arora et al., arXiv:1802.06509; paper, Appendix C.1.

Shapes: c outputs, d inputs, m = min(c, d) hidden units.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_sv.theory.claims.base import TIME, Finding, Line, Panel, claim, ratio_panel
from lightning_sv.theory.flow import FLOOR, TIMES, flow, loss_ratio
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import STUDENTS, TEACHERS, Student, named_teacher

_SOURCE = 'Appendix C.1, "Comparison with Arora et al."'
_dln = partial(claim, "dln", _SOURCE)
_F = STUDENTS["f"]
_G = STUDENTS["g"]
#: time before which a start of size 1/100 could be behind g
EARLY = 0.1


class DeepLinear(Student):
    """A = W_2 W_1: over-parameterized, with the same functions as a matrix (paper, Appendix C.1).

    W = 0 is a fixed point; it starts at W_1, W_2 = start · (1 on the diagonal), which is balanced,
    W_2ᵀ W_2 = W_1 W_1ᵀ.

    Args:
        start: diagonal of both layers; an integer or a Fraction for exact power series
    """

    name = "DLN"

    def __init__(self, start: Fraction | float = Fraction(1, 10)):
        self.start = start

    def initial(self, c: int, d: int) -> list[Array]:
        """Return W_2 (c, m) and W_1 (m, d)."""
        m = min(c, d)
        return [self.start * np.eye(c, m, dtype=int), self.start * np.eye(m, d, dtype=int)]

    def effective(self, *blocks: Any) -> Any:
        """Return W_2 W_1."""
        outer, inner = blocks
        return (outer[:, :, None] * inner[None, :, :]).sum(1)


def balanced(matrix: Array) -> list[Array]:
    """Return (U √S, √S Vᵀ), shapes (c, m) and (m, d), with product `matrix` = U S Vᵀ.

    The factors are balanced: W_2ᵀ W_2 = W_1 W_1ᵀ.
    """
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return [u * np.sqrt(s), np.sqrt(s)[:, None] * v]


def balanced_preconditioner(matrix: Array) -> Array:
    """Return K = (A Aᵀ)^½ ⊗ I + I ⊗ (Aᵀ A)^½ at a balanced state with product A, (c·d, c·d).

    Arora et al., Theorem 1. Its eigenvectors are u_i v_jᵀ, its eigenvalues σ_i + σ_j: it acts on
    the spectrum, while scale vectors act on channels.
    """
    c, d = matrix.shape
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(np.kron((u * s) @ u.T, np.eye(d)) + np.kron(np.eye(c), (v.T * s) @ v))


def singular_value(times: Array, target: float, start: float) -> Array:
    """Return s(t) = σ / (1 + (σ/s_0 − 1) e^(−2σt)), (T,), the solution of ṡ = 2s(σ − s).

    Saxe et al., arXiv:1312.6120.

    σ > 0 is the teacher's singular value in a direction, s_0 > 0 the initial one of the product.
    """
    return np.asarray(target / (1 + (target / start - 1) * np.exp(-2 * target * times)))


class EndRates(NamedTuple):
    """Decay rates of the residuals at the end, −½ d log L / dt."""

    scaled: float  #: of f
    deep: float  #: of a DLN

    @property
    def ratio(self) -> float:
        """DLN over f: above 1, the DLN ends faster."""
        return self.deep / self.scaled


def end_rates(teacher: Array) -> EndRates:
    """Return the final decay rates of the residuals of f and of an aligned DLN.

    The teacher is σ u vᵀ, of rank one.

    f: √(1 + 4‖w*_j‖²) of its slowest nonzero column; DLN: 2σ. The DLN is therefore faster at the
    end iff 4σ² (1 − min v_j²) > 1, with the minimum over the nonzero v_j: never for one nonzero
    column, always for a large teacher with several nonzero columns.
    """
    squares = (np.asarray(teacher, dtype=float) ** 2).sum(0)
    slowest = squares[squares > 0].min()
    return EndRates(float(np.sqrt(1 + 4 * slowest)), 2 * float(np.sqrt(squares.sum())))


@_dln("overhead", "m = min(c, d)")
def _overhead() -> Finding:
    """γ adds d parameters, a second layer c·m + m·d − c·d."""
    agrees = True
    for c, d in ((64, 64), (64, 16), (16, 64), (1, 4)):
        m = min(c, d)
        agrees = agrees and _added_parameters(_F, c, d) == d
        agrees = agrees and _added_parameters(DeepLinear(), c, d) == c * m + m * d - c * d

    d = 64
    scaled = _added_parameters(_F, d, d)
    deep = _added_parameters(DeepLinear(), d, d)
    note = f"c = d = {d}: {scaled} and {deep} parameters more than {d * d}"
    return Finding(d, scaled, None, agrees, note)


def _added_parameters(student: Student, c: int, d: int) -> int:
    """Return the number of parameters beyond those of one matrix."""
    return sum(block.size for block in student.initial(c, d)) - c * d


@claim("dln", "Arora et al. (2018), Theorem 1, two layers", "K", "W_2ᵀ W_2 = W_1 W_1ᵀ")
def _spectral() -> Finding:
    """K = (A Aᵀ)^½ ⊗ I + I ⊗ (Aᵀ A)^½: spectral."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(200):
        a = rng.standard_normal(rng.integers(1, 5, 2))
        ours = DeepLinear().preconditioner(balanced(a))
        stated = balanced_preconditioner(a)
        u, s, v = np.linalg.svd(a, full_matrices=False)
        modes = np.einsum("ci,jd->ijcd", u, v).reshape(s.size**2, a.size)
        values = (s[:, None] + s).ravel()
        off = np.abs(ours @ modes.T - modes.T * values).max()
        worst = max(worst, float(max(np.abs(ours - stated).max(), off) / np.abs(stated).max()))
    note = (
        "J Jᵀ by differentiation against the formula, "
        "and its eigenvectors u_i v_jᵀ with σ_i + σ_j; 200 states"
    )
    return Finding(0.0, worst, worst, worst < 1e-12, note)


def _shares(students: Mapping[str, Student]) -> tuple[list[float], str]:
    """Return the mean fraction of ‖K‖_F² between input channels, and a note.

    The fraction is 0 if each channel has its own preconditioner.

    The mean is over random states, c = d = 3, balanced for a DLN.
    """
    size = 3  # c = d
    input_channel = np.arange(size * size) % size  # of each entry of W, row by row
    apart = input_channel[:, None] != input_channel
    means = []
    for student in students.values():
        rng = np.random.default_rng(0)
        shares = []
        for _ in range(100):
            blocks = [rng.standard_normal(block.shape) for block in student.initial(size, size)]
            if isinstance(student, DeepLinear):
                blocks = balanced(blocks[0])
            k = student.preconditioner(blocks)
            shares.append((k[apart] ** 2).sum() / (k**2).sum())
        means.append(float(np.mean(shares)))
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in zip(students, means, strict=True))
    return means, f"share of ‖K‖² between channels: {listed}"


@_dln("channel-wise", "random states")
def _channel_wise() -> Finding:
    """f's K is 0 between channels, a DLN's is not."""
    (share, deep), note = _shares({"f, scale vector": _F, "DLN, two layers": DeepLinear()})
    return Finding(0.0, share, None, share == 0 and deep > 0.05, note)


@_dln("every design", "random states, c = d = 3", expected="fails")
def _all_channel_wise() -> Finding:
    """scale vectors induce a channel-wise preconditioner, whichever the design."""
    shares, note = _shares({name: STUDENTS[name] for name in ("f", "hg", "ap", "dp", "or", "er")})
    return Finding(0.0, max(shares), None, max(shares) == 0, note)


@claim("dln", "Saxe et al. (2013)", "s(t)", "diagonal W*, start 0.1 I in both layers")
def _closed_form() -> Finding:
    """s(t) = σ / (1 + (σ/s_0 − 1) e^(−2σt))."""
    times = TIMES[TIMES <= 5]
    goals = (0.3, 1.0, 2.5)
    start = 0.1
    worst = 0.0
    states = flow(DeepLinear(start), np.diag(goals), times).states
    products = np.stack([outer @ inner for outer, inner in states])
    lines = []
    for k, goal in enumerate(goals):
        stated = singular_value(times, goal, start**2)
        worst = max(worst, float(np.abs(products[:, k, k] / stated - 1).max()))
        lines.append(Line(f"σ = {goal}, integrated", times, products[:, k, k] / goal))
        lines.append(Line("", times[::14], stated[::14] / goal, marks=True, colour="grey"))
    panel = Panel("A DLN learns each singular value as a logistic", TIME, "s(t) / σ", lines)
    note = "σ = 0.3, 1, 2.5 from s_0 = 0.01; largest relative error up to t = 5"
    return Finding(0.0, worst, worst, worst < 1e-8, note, (panel,))


@_dln("early", f"DLN from 0.1 on the diagonals, t = {EARLY}")
def _early() -> Finding:
    """early on L_f < L_g < L_DLN: scale vectors help from the start, a DLN when A has grown."""
    in_order = []
    overtakes = []
    lines = []
    for teacher in TEACHERS:
        deep = loss_ratio(DeepLinear(), _G, teacher)
        deep_early = float(np.interp(EARLY, deep.times, deep.values))
        scaled_early = loss_ratio(_F, _G, teacher, np.array([EARLY])).largest
        in_order.append(scaled_early < 1 < deep_early)
        ahead = (deep.values < 1) & (deep.times > EARLY)
        overtakes.append(float(deep.times[ahead.argmax()]) if ahead.any() else np.inf)
        if teacher.name in ("scalar", "small row", "row (3, 1)", "full 2×2", "balanced 3×3"):
            lines.append(Line(f"DLN, {teacher.name}", *deep))
    lines.append(Line("f, full 2×2", *loss_ratio(_F, _G, named_teacher("full 2×2"))))
    panel = ratio_panel(
        "Against g: f ahead at once, the DLN late or never", "", "g", lines, (1e-4, 1e4)
    )
    never = sum(np.isinf(t) for t in overtakes)
    note = (
        f"DLN behind g at t = {EARLY}, f ahead, for {sum(in_order)} of {len(TEACHERS)} teachers; "
        f"it overtakes g from t = {min(overtakes):.2f} on at the earliest, "
        f"up to t = {TIMES[-1]:g} not at all for {never}"
    )
    return Finding(len(TEACHERS), float(sum(in_order)), None, all(in_order), note, (panel,))


@claim(
    "dln",
    'ours; "an interesting direction for future work" there',
    "who ends faster",
    "rank one, aligned small start",
)
def _regimes() -> Finding:
    """W* = σ u vᵀ: a DLN ends faster than f iff 4σ²(1 − min_j v_j²) > 1, v_j ≠ 0."""
    teachers = _rank_one_teachers()
    predicted = []
    measured = []
    wrong = 0
    worst = 0.0
    for teacher in teachers:
        stated = end_rates(teacher)
        small = balanced(teacher / np.linalg.norm(teacher) * 0.01)
        integrated = EndRates(
            scaled=_integrated_end_rate(_F, teacher, None),
            deep=_integrated_end_rate(DeepLinear(), teacher, small),
        )
        predicted.append(stated.ratio)
        measured.append(integrated.ratio)
        wrong += int((stated.ratio > 1) != (integrated.ratio > 1))
        errors = [abs(a / b - 1) for a, b in zip(integrated, stated, strict=True)]
        worst = max(worst, *errors)
    panel = Panel(
        "Which ends the faster: a DLN above 1, f below",
        "$2\\sigma \\,/\\, \\min_j \\sqrt{1 + 4\\|w^*_j\\|^2}$: the closed form",
        "ratio of the rates at the end, measured",
        [
            Line("teachers of rank one", predicted, measured, marks=True),
            Line("equal", (0.5, 4), (0.5, 4), colour="grey"),
        ],
        level=1.0,
    )
    share = float(np.mean(np.array(predicted) > 1))
    note = (
        f"{len(teachers)} teachers of rank one, aligned start of size 0.01, "
        f"DLN faster in {share:.0%}; {wrong} against "
        "the closed form; error: largest of a rate, where the losses meet rounding"
    )
    return Finding(
        "iff 4σ²(1 − min v_j²) > 1", float(wrong), worst, not wrong and worst < 0.1, note, (panel,)
    )


def _rank_one_teachers() -> list[Array]:
    """Return 40 teachers of rank one: three scalars, and random ones of norm 0.4 to 2."""
    rng = np.random.default_rng(0)
    teachers: list[Array] = [np.array([[x]]) for x in (0.5, 1.0, 2.0)]
    while len(teachers) < 40:
        left = rng.standard_normal(rng.integers(1, 4))
        right = rng.standard_normal(rng.integers(1, 5))
        product = np.outer(left, right)
        rates = end_rates(product * rng.uniform(0.4, 2) / np.linalg.norm(product))
        arrives = rates.deep > 0.5  # until the end of the integration
        decides = abs(np.log(rates.ratio)) > 0.05  # equal rates decide nothing
        if arrives and decides:
            sigma = rates.deep / 2
            teachers.append(product * sigma / np.linalg.norm(product))
    return teachers


def _integrated_end_rate(student: Student, teacher: Array, initial: list[Array] | None) -> float:
    """Return −½ d log L / dt at the last time at which the loss is far above rounding."""
    run = flow(student, teacher, np.linspace(0.5, 25, 250), initial=initial)
    last = int(np.flatnonzero(run.loss > 1e4 * FLOOR * run.loss[0])[-1])
    return -student.rate(run.states[last], teacher) / (2 * run.loss[last])
