"""Norms of a traced model, with their scale vectors and the matrices that read them.

A vector may move from its norm into the matrices behind it if they read nothing else of it:

    gamma * xhat -> q_proj, k_proj, v_proj      moves: W diag(gamma), in each of them
    gamma * xhat + b -> q_proj                  moves, and b becomes b / gamma
    gamma * xhat -> q_proj, conv                stays, for one of the reasons of `Reason`

Experts that no token of the example reached have the norm of their siblings.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.bare_norms import bare_norms
from lightning_sv.interop.apply.biases import Added, added_after
from lightning_sv.interop.apply.matrices import Matrices, TracedBranch
from lightning_sv.interop.apply.traced_norm import Reason, Stays, TracedNorm
from lightning_sv.roles import family
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.dataflow import value_at
from lightning_sv.roles.graph import Node
from lightning_sv.roles.types import ModelParameter, agreed

_VECTORS = ("input", "output")
_MATRICES = ("matrix", "router", "head")


def find_norms(traced: TracedModel, *, bare: bool = False) -> list[TracedNorm]:
    """Return the norms of a model that have a scale vector, in its own order.

    With `bare` also norms without one that only matrices read.
    """
    matrices = Matrices(traced)
    norms = []
    for row in traced.roles.parameters:
        if row.role in _VECTORS:
            norms.append(_Vector(row, matrices).norm())
    if bare:
        norms += bare_norms(matrices)
    return _with_siblings(norms, traced)


class _Vector:
    """A scale vector of the trace.

    Attributes:
        readers: names of the matrices that read its values
        branches: those that can have vectors; none of an output vector
        added: what is added to its values before these
    """

    def __init__(self, row: ModelParameter, matrices: Matrices) -> None:
        self.row = row
        self.matrices = matrices
        self.readers = self._readers()
        self.branches: list[TracedBranch] = []
        self.added = Added()
        if row.role == "input":
            self.branches = matrices.branches(self.readers)
        if self.branches:
            self.added = added_after(row.name, matrices.traced)

    def _readers(self) -> list[str]:
        traced = self.matrices.traced
        return self.matrices.names_read(traced.consumers_of(self.row.name))

    def norm(self) -> TracedNorm:
        """Return the norm of the vector, with the matrices that read it."""
        tied = self.matrices.tied
        names = [branch.weight for branch in self.branches]
        stays = next(self._reasons_to_stay(), None)
        return TracedNorm(
            vector=self.row.name,
            origin=_origin(self.row, self.matrices.traced),
            role=self.row.role,
            bias=self.added.bias if stays is None else None,
            branches=tuple(branch for branch in self.branches if branch.weight not in tied),
            tied=tuple(sorted(tied.intersection(names))),
            stays=stays,
            unfit=tuple(name for name in self.readers if name not in names),
        )

    def _reasons_to_stay(self) -> Iterator[Stays]:
        """Yield why it cannot move into the matrices that read it, the first reason first."""
        if self.row.name in self.matrices.tied:
            yield Stays(Reason.TIED)
        if self.added.others:
            yield Stays(Reason.OTHERS_ADDED)
        for branch in self.branches:
            yield from self._misfits(branch.weight)
        has_unfit = len(self.branches) < len(self.readers)
        if has_unfit and self.row.role == "input":
            yield Stays(Reason.UNFIT)
        if not self.row.redundant:
            yield Stays(Reason.NEEDED)

    def _misfits(self, weight: str) -> Iterator[Stays]:
        """Yield why one matrix cannot absorb it."""
        shape = self.row.shape
        if weight in self.matrices.tied:
            yield Stays(Reason.MATRIX_TIED, weight)
        if len(shape) != 1:
            yield Stays(Reason.SHAPE, len(shape))
        elif self.matrices.width_read(weight) != shape[0]:
            yield Stays(Reason.WIDTH, weight)


def _origin(row: ModelParameter, traced: TracedModel) -> float | None:
    """Return the constant added to a parameter for gamma.

    None if gamma is a different function, or a part, of the parameter.
    """
    if row.name not in traced.scaled:  # a vector of an expert without tokens
        return row.decays_to
    if "bias" in traced.use_roles[row.name]:  # a table of gammas and biases
        return None
    return agreed({_constant_added(scaled.factor) for scaled in traced.scaled[row.name]})


def _constant_added(factor: Node) -> float | None:
    """Return c of a factor w + c of a parameter w; None for another function of it."""
    gammas = [value_at(factor, parameter) for parameter in (0.0, 1.0, 3.0)]
    c = gammas[0]
    if c is None:
        return None
    return c if gammas == [c, c + 1, c + 3] else None


def _with_siblings(norms: list[TracedNorm], traced: TracedModel) -> list[TracedNorm]:
    """Add experts without tokens to the norm of their siblings.

    Names of siblings differ only in the last number.

    Raises:
        ConfigError: a sibling has a norm of its own that the pass does not reach, as in a layer
            that it skips
    """
    unreached_norms = set(map(_siblings, _unreached(traced, _VECTORS, traced.scaled)))
    reached: dict[str, tuple[TracedNorm, TracedBranch]] = {}
    families: set[str] = set()
    for norm, branch in _branches_of(norms):
        families.add(family(branch.weight))
        if _siblings(norm.vector) not in unreached_norms:
            reached[_siblings(branch.weight)] = norm, branch

    added: dict[TracedNorm, list[TracedBranch]] = defaultdict(list)
    for name in _unreached(traced, _MATRICES, traced.products):
        if _siblings(name) in reached:
            norm, branch = reached[_siblings(name)]
            added[norm].append(branch._replace(weight=name))
        elif family(name) in families:
            what = f"no token of the example reached {name}, so its scale vector is unknown"
            hint = "pass an example that reaches it, such as one with more tokens."
            raise ConfigError(f"{what}; {hint}")
    return [replace(norm, branches=(*norm.branches, *added[norm])) for norm in norms]


def _branches_of(norms: Iterable[TracedNorm]) -> Iterator[tuple[TracedNorm, TracedBranch]]:
    for norm in norms:
        for branch in norm.branches:
            yield norm, branch


def _unreached(
    traced: TracedModel, roles: Collection[str], reached: Collection[str]
) -> Iterator[str]:
    """Yield the names of parameters with one of these roles that the pass did not reach."""
    for row in traced.roles.parameters:
        if row.role in roles and row.name not in reached:
            yield row.name


def _siblings(name: str) -> str:
    """Return a name with its last number replaced by '*'."""
    return re.sub(r"^(.*\.|)\d+(?![^.])", r"\1*", name)
