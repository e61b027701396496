"""Table 1: every design is A = diag(u) W diag(v), and the resulting preconditioner of A."""

import numpy as np

from lightning_sv.theory.claims.base import Advance, Claim, Finding, counted
from lightning_sv.theory.claims.reparameterization import stated_exponential, stated_preconditioner
from lightning_sv.theory.dual import Array
from lightning_sv.theory.students import STUDENTS, Heterogeneous, ScaledInput

_DESIGNS = ("f", "hg", "ap", "dp", "or", "er")


def unified_preconditioner(w: Array, u: Array, v: Array, p_u: Array, p_v: Array) -> Array:
    """Return K = D² + (u W)(u W)ᵀ ∘ P_v + (W v)(W v)ᵀ ∘ P_u of A = U ∘ W ∘ V, flattened by rows.

    P is J Jᵀ of a scale field in its own parameters; entries of u W, W v are those of U ∘ W and W ∘ V, D² is
    diag(U ∘ U ∘ V ∘ V). If a design has no vector on a side, the field is 1 and P is 0.

    Args:
        w: the matrix, shape (c, d)
        u: output-side field of each entry, shape (c, d)
        v: input-side field of each entry, shape (c, d)
        p_u: P of u between entries, shape (c·d, c·d)
        p_v: P of v between entries, shape (c·d, c·d)
    """
    by_u, by_v = (u * w).ravel(), (w * v).ravel()
    return np.asarray(np.diag((u * v).ravel() ** 2) + np.outer(by_u, by_u) * p_v + np.outer(by_v, by_v) * p_u)


def table_1(name: str, blocks: list[Array]) -> Array:
    """Return K of one design from its row in Table 1: u, v, and the P of each."""
    w, *scales = blocks
    c, d = w.shape
    ones, none = np.ones((c, d)), np.zeros((c * d, c * d))
    same_row, same_column = np.kron(np.eye(c), np.ones((d, d))), np.kron(np.ones((c, c)), np.eye(d))
    u, v, p_u, p_v = ones, ones, none, none
    if name in ("ap", "dp"):
        u, p_u = scales[0][:, None] * ones, same_row
    if name in ("f", "dp"):
        v, p_v = scales[-1] * ones, same_column
    if name == "hg":
        branch = Heterogeneous().branch_of(c)
        v, p_v = scales[0][branch], np.kron(branch[:, None] == branch, np.eye(d))
    if name in ("or", "er"):
        student = STUDENTS[name]
        assert isinstance(student, ScaledInput)
        stated = {"or": stated_preconditioner, "er": stated_exponential}[name]
        v, p_v = student.gamma(*scales) * ones, np.kron(np.ones((c, c)), stated(*scales))
    return unified_preconditioner(w, u, v, p_u, p_v)


def _unified(advance: Advance) -> Finding:
    rng = np.random.default_rng(0)
    worst = dict.fromkeys(_DESIGNS, 0.0)
    for name in counted(_DESIGNS, advance):
        for _ in range(60):
            c, d = (int(n) for n in rng.integers(1, 5, 2))
            blocks = [rng.standard_normal(block.shape) for block in STUDENTS[name].initial(c, d)]
            k = STUDENTS[name].preconditioner(blocks)
            worst[name] = max(worst[name], float(np.abs(table_1(name, blocks) - k).max() / np.abs(k).max()))
    note = "J Jᵀ by differentiation against the formula, 60 random states each: " + ", ".join(
        f"{name} {error:.0e}" for name, error in worst.items()
    )
    error = max(worst.values())
    return Finding(0.0, error, error, error < 1e-12, note)


CLAIMS = (
    Claim(
        "table1",
        "J Jᵀ",
        "Section 3.4, Table 1; the formula is ours",
        "vec(Ȧ) = −K ∇L with K = diag(U²V²) + (UW)(UW)ᵀ∘P_v + (WV)(WV)ᵀ∘P_u",
        "any state of f, HG, AP, DP, OR, ER; c, d ≤ 4",
        _unified,
    ),
)
