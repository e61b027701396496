"""Teachers W*: exact matrices, and the conditions of the theorems."""

from dataclasses import dataclass
from fractions import Fraction

from lightning_sv.theory.dual import Array
from lightning_sv.theory.students import exact

Number = int | Fraction


@dataclass(frozen=True)
class Teacher:
    """A matrix W* of rationals with a name.

    >>> Teacher("mine", ((8, 1),)).balanced
    False

    Args:
        name: name in tables and legends
        rows: c rows of d numbers
    """

    name: str
    rows: tuple[tuple[Number, ...], ...]

    @property
    def matrix(self) -> Array:
        """W* in Fractions, shape (c, d)."""
        return exact(self.rows)

    @property
    def matching(self) -> bool:
        """True for at most one nonzero entry per row and column: the condition of DP (iii)."""
        support = self.matrix != 0
        return bool((support.sum(0) <= 1).all() and (support.sum(1) <= 1).all() and support.any())

    @property
    def balanced(self) -> bool:
        """True for several columns, all of the same positive norm: the condition of OR (iii)."""
        squares = {sum(x * x for x in column) for column in self.matrix.T}
        return len(squares) == 1 and self.matrix.shape[1] > 1 and squares != {0}


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
