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

    With `bare` also norms without one that only matrices read. Vectors with given roles that the
    pass does not reach are left out.
    """
    matrices = Matrices(traced)
    norms = []
    for row in traced.roles.parameters:
        is_reached = row.name in traced.scaled or row.name not in traced.known
        if row.role in _VECTORS and is_reached:
            norms.append(_norm(row, matrices))
    if bare:
        norms += bare_norms(matrices)
    return _with_siblings(norms, traced)


def _norm(row: ModelParameter, matrices: Matrices) -> TracedNorm:
    """Return the norm of a vector, with the matrices that read it."""
    readers = _readers(row, matrices)
    found = _branches(row, readers, matrices)
    added = added_after(row.name, matrices.traced) if found else Added()
    stays = next(_reasons_to_stay(row, readers, found, added, matrices), None)
    names = [branch.weight for branch in found]
    return TracedNorm(
        vector=row.name,
        origin=_origin(row, matrices.traced),
        role=row.role,
        bias=added.bias if stays is None else None,
        branches=tuple(branch for branch in found if branch.weight not in matrices.tied),
        tied=tuple(sorted(matrices.tied.intersection(names))),
        stays=stays,
        unfit=tuple(name for name in readers if name not in names),
    )


def _readers(row: ModelParameter, matrices: Matrices) -> list[str]:
    """Return the names of the matrices that read a vector's values."""
    traced = matrices.traced
    if row.role == "output" and row.name in traced.known:
        return []  # a role may be given because the consumers are unknown
    return matrices.names_read(traced.consumers_of(row.name))


def _branches(row: ModelParameter, readers: list[str], matrices: Matrices) -> list[TracedBranch]:
    """Return the readers of an input vector that can have vectors."""
    if row.role == "output":
        return []
    return matrices.branches(readers)


def _reasons_to_stay(
    row: ModelParameter,
    readers: list[str],
    found: list[TracedBranch],
    added: Added,
    matrices: Matrices,
) -> Iterator[Stays]:
    """Yield why a vector cannot move into the matrices that read it, the first reason first."""
    if row.name in matrices.tied:
        yield Stays(Reason.TIED)
    if added.others:
        yield Stays(Reason.OTHERS_ADDED)
    for branch in found:
        yield from _misfits(row, branch.weight, matrices)
    if row.role == "input" and len(found) < len(readers):
        yield Stays(Reason.UNFIT)
    if not row.redundant:
        yield Stays(Reason.NEEDED)


def _misfits(row: ModelParameter, weight: str, matrices: Matrices) -> Iterator[Stays]:
    """Yield why one matrix cannot absorb a vector."""
    if weight in matrices.tied:
        yield Stays(Reason.MATRIX_TIED, weight)
    if len(row.shape) != 1:
        yield Stays(Reason.SHAPE, len(row.shape))
    elif matrices.width_read(weight) != row.shape[0]:
        yield Stays(Reason.WIDTH, weight)


def _origin(row: ModelParameter, traced: TracedModel) -> float | None:
    """Return the constant added to a parameter for gamma.

    None if gamma is a different function, or a part, of the parameter.
    """
    if row.name not in traced.scaled:  # a vector of an expert without tokens
        return row.decays_to
    if "bias" in traced.uses[row.name]:  # a table of gammas and biases
        return None
    return agreed({_constant_added(factor) for _, factor in traced.scaled[row.name]})


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
        elif family(name) in families and name not in traced.known:
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
