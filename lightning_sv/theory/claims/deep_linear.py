"""Comparison with two-layer deep linear networks.

Arora et al., arXiv:1802.06509; paper, Appendix C.1.

Shapes: c outputs, d inputs, m = min(c, d) hidden units.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, claim, ratio_panel
from lightning_sv.theory.flow import TIMES, loss_ratio
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import STUDENTS, TEACHERS, Student, named_teacher

_SOURCE = 'Appendix C.1, "Comparison with Arora et al."'
_dln = partial(claim, "dln", _SOURCE)
_F = STUDENTS["f"]
_G = STUDENTS["g"]
#: time before which a start of size 1/100 could be behind g
EARLY = 0.1
#: random states of the mean shares, whose standard errors are below 0.003
N_STATES = 4_000


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
        worst = max(worst, float(np.abs(ours - stated).max() / np.abs(stated).max()))
    note = "J Jᵀ by differentiation against the formula, 200 states"
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
        for _ in range(N_STATES):
            blocks = [rng.standard_normal(block.shape) for block in student.initial(size, size)]
            if isinstance(student, DeepLinear):
                blocks = balanced(blocks[0])
            k = student.preconditioner(blocks)
            shares.append((k[apart] ** 2).sum() / (k**2).sum())
        means.append(float(np.mean(shares)))
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in zip(students, means, strict=True))
    return means, f"share of ‖K‖² between channels, mean of {N_STATES:,} states: {listed}"


@_dln("channel-wise", "random states")
def _channel_wise() -> Finding:
    """f's K is 0 between channels, a DLN's is not."""
    (share, deep), note = _shares({"f, scale vector": _F, "DLN, two layers": DeepLinear()})
    return Finding(0.0, share, None, share == 0 and deep > 0.02, note)


@_dln("every design", "random states, c = d = 3", expected="fails")
def _all_channel_wise() -> Finding:
    """scale vectors induce a channel-wise preconditioner, whichever the design."""
    shares, note = _shares({name: STUDENTS[name] for name in ("f", "hg", "ap", "dp", "or", "er")})
    return Finding(0.0, max(shares), None, max(shares) == 0, note)


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
