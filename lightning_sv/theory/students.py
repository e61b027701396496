"""Students and teachers of the theorems: linear maps of a normalized input.

Setting (paper, Section 2.1): x ~ N(0, I_d), so z = Norm(x) has E[z zᵀ] = I_d, and the squared loss
of a student x -> A z against the teacher W* z is L = ½‖A − W*‖_F². A student is its map parameters
-> A.

Shapes: c outputs, d inputs; A, W* (c, d); n parameters in all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from lightning_sv.theory.series import Array, check_analytic, exact, exact_jacobian, jacobian, join


class Student(ABC):
    """A = effective(*blocks), with the student's parameters as blocks.

    A subclass defines the initial parameters and A, by analytic functions of numpy (not `np.abs` or
    `np.linalg.norm`). Its gradient, flow and implicit preconditioner follow by differentiation of
    `effective`. A subclass may override `gradient`, for instance to add weight decay to the flow.
    For exact power series the functions are `+ - * /`, integer powers, `np.sqrt`, `np.exp`, `sum`,
    `mean` and indexing.
    """

    name: str  #: symbol in legends

    @abstractmethod
    def initial(self, c: int, d: int) -> list[Array]:
        """Return the parameters at t = 0."""

    @abstractmethod
    def effective(self, *blocks: Any) -> Any:
        """Return A, shape (c, d)."""

    def gradient(self, blocks: list[Array], teacher: Array) -> Array:
        """Return the gradient of ½‖A − W*‖_F² with respect to all parameters, shape (n,)."""
        residual = self.effective(*blocks) - teacher
        is_exact = join(blocks).dtype == object
        differentiate = exact_jacobian if is_exact else jacobian
        return np.asarray(residual.ravel() @ differentiate(self.effective, blocks))

    def preconditioner(self, blocks: list[Array]) -> Array:
        """Return K = J Jᵀ of A by the parameters, (c·d, c·d): vec(Ȧ) = −K vec(A − W*)."""
        return preconditioner(self.effective, blocks)

    def rate(self, blocks: list[Array], teacher: Array) -> float:
        """Return dL/dt of the flow: −∇L · `gradient`, which is −‖∇L‖² of the gradient flow."""
        # a subclass may move along a different gradient than that of L
        return float(-Student.gradient(self, blocks, teacher) @ self.gradient(blocks, teacher))


def preconditioner(function: Callable[..., Any], blocks: Sequence[Array]) -> Array:
    """Return J Jᵀ with J = ∂vec(function)/∂blocks, flattened by rows.

    The flow of L moves the value by −J Jᵀ ∇L.
    """
    check_analytic(function, blocks)
    j = jacobian(function, blocks)
    return np.asarray(j @ j.T)


class Scaled(Student):
    """A matrix W, which is 0 at t = 0, with scale parameters.

    Args:
        name: symbol in legends
        scales: function from (c, d) to the scale parameters at t = 0
        effective: function from W and the scale parameters to A
    """

    def __init__(
        self, name: str, scales: Callable[[int, int], list[Array]], effective: Callable[..., Any]
    ):
        self.name = name
        self._scales = scales
        self._effective = effective

    def initial(self, c: int, d: int) -> list[Array]:
        """Return W = 0 and the scale parameters."""
        return [np.zeros((c, d)), *self._scales(c, d)]

    def effective(self, *blocks: Any) -> Any:
        """Return A, shape (c, d)."""
        return self._effective(*blocks)


def original_space(alpha: Any, beta: Any) -> Any:
    """Return γ = β·α / rms(α) of OR (paper, Section 3.3); α (d,), β (1,) -> (d,)."""
    return alpha * (beta / np.sqrt((alpha * alpha).mean()))


def exponential(alpha: Any, beta: Any) -> Any:
    """Return γ = exp(β)·exp(α − mean α) of ER (paper, Section 3.3); α (d,), β (1,) -> (d,)."""
    return np.exp(alpha + (beta - alpha.mean()))


def branch_of(c: int) -> Array:
    """Return the branch of each of c rows under HG, (c,): 0 for the first half, and then 1.

    Of an odd number of rows branch 0 has one more; a single row is one branch.
    """
    n_branches = min(2, c)
    return np.arange(c) * n_branches // c


#: name -> student; ap, dp and f have scale vectors after W, on both sides and before it (paper,
#: Sections 3.1 to 3.3)
STUDENTS: dict[str, Student] = {
    "g": Scaled("g", lambda c, d: [], lambda w: w),
    "f": Scaled("f", lambda c, d: [np.ones(d)], lambda w, b: w * b),
    "hg": Scaled(
        "HG",
        lambda c, d: [np.ones((min(2, c), d))],
        lambda w, gammas: w * gammas[branch_of(w.shape[0])],
    ),
    "ap": Scaled("AP", lambda c, d: [np.ones(c)], lambda w, a: a[:, None] * w),
    "dp": Scaled("φ", lambda c, d: [np.ones(c), np.ones(d)], lambda w, a, b: a[:, None] * w * b),
    "or": Scaled(
        "ψ", lambda c, d: [np.ones(d), np.ones(1)], lambda w, *scale: w * original_space(*scale)
    ),
    "er": Scaled(
        "ER", lambda c, d: [np.zeros(d), np.zeros(1)], lambda w, *scale: w * exponential(*scale)
    ),
}


class Teacher(NamedTuple):
    """A matrix W* of rationals with a name.

    >>> Teacher("mine", ((8, 1),)).balanced
    False

    Attributes:
        name: name in tables and legends
        rows: c rows of d numbers
    """

    name: str
    rows: tuple[tuple[int | Fraction, ...], ...]

    @property
    def matrix(self) -> Array:
        """W* in Fractions, shape (c, d)."""
        return exact(self.rows)

    @property
    def matching(self) -> bool:
        """True for at most one nonzero entry per row and column, and at least one in all.

        It is the condition of DP (iii).
        """
        support = self.matrix != 0
        per_column = support.sum(0)
        per_row = support.sum(1)
        return bool(max(*per_column, *per_row) == 1)

    @property
    def balanced(self) -> bool:
        """True for several columns, all of the same positive norm: the condition of OR (iii)."""
        first, *others = (self.matrix**2).sum(0)
        return first > 0 and bool(others) and all(square == first for square in others)


_HALF = Fraction(1, 2)

#: teachers of all claims; a claim with a condition uses those that satisfy it
TEACHERS = (
    Teacher("scalar", ((2,),)),
    Teacher("small row", ((_HALF, -_HALF / 2),)),
    Teacher("column (2, 1)", ((2,), (1,))),
    Teacher("row (3, 1)", ((3, 1),)),
    Teacher("full 2×2", ((1, 2), (3, -1))),
    Teacher("full 2×3", ((1, _HALF, -2), (0, 3 * _HALF, 1))),
    Teacher("one entry", ((0, 0, 1), (0, 0, 0))),
    Teacher("matching 2×3", ((0, 2, 0), (-1, 0, 0))),
    Teacher("matching 3×3", ((0, 0, 3), (_HALF, 0, 0), (0, -1, 0))),
    Teacher("balanced row", ((1, -1, 1),)),
    Teacher("balanced 2×2", ((1, 0), (1, Fraction(-7, 5)), (0, Fraction(1, 5)))),
    Teacher("balanced 3×3", ((1, 2, 2), (2, 1, -2), (2, -2, 1))),
)


def named_teacher(name: str) -> Teacher:
    """Return the teacher of `TEACHERS` with this name."""
    (teacher,) = (teacher for teacher in TEACHERS if teacher.name == name)
    return teacher
