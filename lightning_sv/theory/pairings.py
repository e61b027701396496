"""Claims (i): two students at the same effective state, and which of them descends faster at that instant.

The proofs use more than the statements say: γa_i² ≥ 1 (DP) and ρ ≥ 1 (OR), which the standard initialization
preserves and a state off the trajectory need not have. `guard` is that number.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_sv.theory.dual import Array, split
from lightning_sv.theory.flow import flow
from lightning_sv.theory.students import STUDENTS, OriginalSpace, Student

_F = STUDENTS["f"]


class Rates(NamedTuple):
    """dL/dt of a student and of the standard model f."""

    student: float
    standard: float

    @property
    def violates(self) -> bool:
        """Whether dL_student/dt ≤ dL_f/dt ≤ 0 fails, beyond rounding."""
        return self.student > self.standard + 1e-12 * (1 + abs(self.standard)) or self.standard > 0


class State(NamedTuple):
    """Parameters of the student and the teacher they are trained on."""

    blocks: list[Array]
    teacher: Array


@dataclass(frozen=True)
class Pairing:
    """A student, and the parameters of f with the same effective matrix and the same γ.

    Args:
        student: the one that is compared with f
        guard_name: symbol of the guard
        standard: f's parameters (W, γ) at a state of the student
        guard: number that the proof needs to be at least 1
    """

    student: Student
    guard_name: str
    standard: Callable[[list[Array]], list[Array]]
    guard: Callable[[list[Array]], float]

    def rates(self, state: State) -> Rates:
        """dL/dt of both."""
        standard = _F.rate(self.standard(state.blocks), state.teacher)
        return Rates(self.student.rate(state.blocks, state.teacher), standard)

    def random(self, rng: np.random.Generator) -> State:
        """A state anywhere: every parameter and the teacher standard normal, c and d from 1 to 4."""
        c, d = (int(n) for n in rng.integers(1, 5, 2))
        blocks = [rng.standard_normal(block.shape) for block in self.student.initial(c, d)]
        return State(blocks, rng.standard_normal((c, d)))

    def on_trajectory(self, rng: np.random.Generator, times: Sequence[float]) -> list[State]:
        """States of the student's own flow from its standard initialization, for a random teacher."""
        c, d = rng.integers(1, 5, 2)
        teacher = rng.standard_normal((c, d))
        return [State(blocks, teacher) for blocks in flow(self.student, teacher, times).states]

    def smallest_violation(self, c: int, d: int, grid: Sequence[float]) -> tuple[State, Rates] | None:
        """The violation nearest to the standard initialization, of all states with entries on a grid.

        Nearest in Σ|parameter − its start|, then in Σ|W*|; scale parameters stay positive, W* is not 0.
        """
        start = self.student.initial(c, d)
        shapes = [*start, np.zeros((c, d))]
        choices = [
            [value for value in grid if block.ndim == 2 or value > 0] for block in shapes for _ in range(block.size)
        ]
        first = np.concatenate([block.ravel() for block in start])

        def size(entries: tuple[float, ...]) -> tuple[float, float]:
            values = np.array(entries)
            return float(np.abs(values[: first.size] - first).sum()), float(np.abs(values[first.size :]).sum())

        for entries in sorted(itertools.product(*choices), key=size):
            *blocks, teacher = split(np.array(entries, dtype=float), shapes)
            state = State(blocks, teacher)
            if state.teacher.any() and (rates := self.rates(state)).violates:
                return state, rates
        return None


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
        lambda blocks: [blocks[0], OriginalSpace().gamma(*blocks[1:])],
        lambda blocks: float(blocks[2][0] ** 2 / (blocks[1] * blocks[1]).mean()),
    ),
}
