"""Two-layer deep linear networks, the paper's comparison for scale vectors (Arora et al., arXiv:1802.06509).

Shapes: c outputs, d inputs, m = min(c, d) hidden units.
"""

from fractions import Fraction
from typing import Any

import numpy as np

from lightning_sv.theory.dual import Array
from lightning_sv.theory.students import Student


class DeepLinear(Student):
    """A = W_2 W_1: over-parameterized, with the same functions as a matrix (paper, Appendix C.1).

    W = 0 is a fixed point; it starts at W_1, W_2 = start · (1 on the diagonal), which is balanced,
    W_2ᵀ W_2 = W_1 W_1ᵀ.

    Args:
        start: diagonal of both layers; a whole number or a Fraction for exact power series
    """

    name = "DLN, two layers"

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
    """Return (U √S, √S Vᵀ) with product `matrix` = U S Vᵀ and W_2ᵀ W_2 = W_1 W_1ᵀ; shapes (c, m), (m, d)."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return [u * np.sqrt(s), np.sqrt(s)[:, None] * v]


def balanced_preconditioner(matrix: Array) -> Array:
    """Return K = (A Aᵀ)^½ ⊗ I + I ⊗ (Aᵀ A)^½ at a balanced state with product A, (c·d, c·d).

    Arora et al., Theorem 1. Its eigenvectors are u_i v_jᵀ, its eigenvalues σ_i + σ_j: it acts on the spectrum, while
    scale vectors act on channels.
    """
    c, d = matrix.shape
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(np.kron((u * s) @ u.T, np.eye(d)) + np.kron(np.eye(c), (v.T * s) @ v))


def singular_value(times: Array, target: float, start: float) -> Array:
    """Return s(t) = σ / (1 + (σ/s_0 − 1) e^(−2σt)), from ṡ = 2s(σ − s) (Saxe et al., arXiv:1312.6120).

    Args:
        times: shape (T,)
        target: σ > 0, the teacher's singular value in that direction
        start: initial singular value s_0 > 0 of the product
    """
    return np.asarray(target / (1 + (target / start - 1) * np.exp(-2 * target * times)))


def end_rates(teacher: Array) -> tuple[float, float]:
    """Return the final decay rates of the residuals of f and of an aligned DLN, for a teacher σ u vᵀ of rank one.

    f: √(1 + 4‖w*_j‖²) of its slowest nonzero column; DLN: 2σ. The DLN is therefore faster at the end iff
    4σ² (1 − min_j v_j²) > 1: never for one column, always for a large teacher shared by many columns.
    """
    squares = (np.asarray(teacher, dtype=float) ** 2).sum(0)
    return float(np.sqrt(1 + 4 * squares[squares > 0].min())), 2 * float(np.sqrt(squares.sum()))
