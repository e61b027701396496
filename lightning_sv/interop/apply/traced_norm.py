"""A norm of a model, and why its scale vector stays in it.

A `TracedNorm` is all that a strategy needs to know: the vector, the branches behind the norm, and
whether these can take the vector up. `find_norms.py` and `bare_norms.py` make it of a trace.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from lightning_sv.interop.apply.matrices import TracedBranch


@dataclass(frozen=True)
class TracedNorm:
    """A norm of the model, with or without a scale vector.

    Attributes:
        vector: name of the parameter; '' for a norm without one
        origin: constant c of gamma = w + c, with the parameter w; None if gamma is a different
            function of w, or a part of it
        role: 'input' or 'output'
        bias: name of the bias that its norm adds
        branches: matrices that read it; empty for an output vector
        tied: names of matrices that read it and are tied to a different parameter
        stays: why it cannot be folded into the matrices; None if it can
        unfit: names of matrices that read it and cannot have vectors; of an output vector, all
    """

    vector: str
    origin: float | None
    role: str
    bias: str | None = None
    branches: tuple[TracedBranch, ...] = ()
    tied: tuple[str, ...] = ()
    stays: str | None = None
    unfit: tuple[str, ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of all matrices that read it."""
        return (*(branch.weight for branch in self.branches), *self.tied, *self.unfit)


def branches_of(norms: Iterable[TracedNorm]) -> Iterator[TracedBranch]:
    """Return the branches behind all norms."""
    return chain.from_iterable(norm.branches for norm in norms)
