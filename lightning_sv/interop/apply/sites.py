"""Scale vectors of a traced model and the matrices that read them."""

import re
from collections import defaultdict
from dataclasses import replace

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.bare_norms import bare_sites
from lightning_sv.interop.apply.biases import OTHERS, biases_after
from lightning_sv.interop.apply.matrices import Matrices, SiteMatrix
from lightning_sv.interop.apply.site import Reason, Site, Stays
from lightning_sv.roles import family
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.dataflow import value_at
from lightning_sv.roles.types import ModelParameter

_VECTORS = ("input", "output")
_MATRICES = ("matrix", "router", "head")


def find_sites(traced: TracedModel, *, bare: bool = False) -> list[Site]:
    """Return the model's scale vectors, in its own order.

    With `bare` also norms without one that only matrices read. Names with given roles that the pass
    does not reach have no site.
    """
    matrices = Matrices(traced)
    sites = []
    for row in traced.roles.parameters:
        is_reached = row.name in traced.scaled or row.name not in traced.known
        if row.role in _VECTORS and is_reached:
            sites.append(_site(row, matrices))
    if bare:
        sites += bare_sites(matrices)
    return _with_siblings(sites, traced)


def _site(row: ModelParameter, matrices: Matrices) -> Site:
    """Return the site of a vector, with the matrices that read it."""
    readers = _readers(row, matrices)
    found = _matrices_of(row, readers, matrices)
    biases = biases_after(row.name, matrices.traced) if found else set()
    stays = _reason_to_stay(row, readers, found, biases, matrices)
    names = [matrix.weight for matrix in found]
    bias_names = frozenset[str]().union(*biases)
    return Site(
        vector=row.name,
        origin=_origin(row, matrices.traced),
        role=row.role,
        bias=next(iter(bias_names), None) if stays is None else None,
        matrices=tuple(matrix for matrix in found if matrix.weight not in matrices.tied),
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


def _matrices_of(row: ModelParameter, readers: list[str], matrices: Matrices) -> list[SiteMatrix]:
    """Return the readers of an input vector that can have vectors."""
    if row.role == "output":
        return []
    found = map(matrices.find, readers)
    return [matrix for matrix in found if matrix is not None]


def _reason_to_stay(
    row: ModelParameter,
    readers: list[str],
    found: list[SiteMatrix],
    biases: set[frozenset[str]],
    matrices: Matrices,
) -> Stays | None:
    """Return why a vector cannot move into the matrices that read it; None if it can."""
    if row.name in matrices.tied:
        return Stays(Reason.TIED)
    misfit = _unfit_bias(biases)
    for matrix in reversed(found):
        misfit = misfit or _misfit(row, matrix, matrices)
    if misfit is not None:
        return misfit
    if row.role == "input" and len(found) < len(readers):
        return Stays(Reason.UNFIT)
    return None if row.redundant else Stays(Reason.NEEDED)


def _unfit_bias(biases: set[frozenset[str]]) -> Stays | None:
    """Return why a vector cannot leave what is added to it."""
    if len(biases) > 1:
        return Stays(Reason.DIFFERENT_BIASES)
    for names in biases:
        if names == OTHERS or len(names) > 1:
            return Stays(Reason.OTHERS_ADDED)
    return None


def _misfit(row: ModelParameter, matrix: SiteMatrix, matrices: Matrices) -> Stays | None:
    """Return why one matrix cannot absorb a vector."""
    if matrix.weight in matrices.tied:
        return Stays(Reason.MATRIX_TIED, matrix.weight)
    if len(row.shape) != 1:
        return Stays(Reason.SHAPE, len(row.shape))
    if matrices.width_read(matrix) != row.shape[0]:
        return Stays(Reason.WIDTH, matrix.weight)
    return None


def _origin(row: ModelParameter, traced: TracedModel) -> float | None:
    """Return the constant added to a parameter for gamma.

    None if gamma is a different function, or a part, of the parameter.
    """
    if row.name not in traced.scaled:  # a vector of an expert without tokens
        return row.decays_to
    if "bias" in traced.uses[row.name]:  # a table of gammas and biases
        return None
    added = set()
    for _, factor in traced.scaled[row.name]:
        for at in (0.0, 1.0, 3.0):
            gamma = value_at(factor, at)
            added.add(None if gamma is None else gamma - at)
    return added.pop() if len(added) == 1 else None


def _with_siblings(sites: list[Site], traced: TracedModel) -> list[Site]:
    """Add experts without tokens to the site of their siblings.

    Names of siblings differ only in the last number.

    Raises:
        ConfigError: a sibling has a norm of its own that the pass does not reach, as in a layer
            that it skips
    """
    reached: dict[str, tuple[Site, SiteMatrix]] = {}
    for site in sites:
        reached.update((_siblings(matrix.weight), (site, matrix)) for matrix in site.matrices)
    unreached_norms = _unreached_norms(traced)
    added: dict[Site, list[SiteMatrix]] = defaultdict(list)
    for name in _unreached_matrices(traced):
        like = reached.get(_siblings(name))
        if like is not None and _siblings(like[0].vector) not in unreached_norms:
            site, matrix = like
            added[site].append(matrix._replace(weight=name))
        elif family(name) in map(family, reached) and name not in traced.known:
            what = f"no token of the example reached {name}, so its scale vector is unknown"
            hint = "pass an example that reaches it, such as one with more tokens."
            raise ConfigError(f"{what}; {hint}")
    return [replace(site, matrices=(*site.matrices, *added[site])) for site in sites]


def _unreached_norms(traced: TracedModel) -> set[str]:
    rows = [row for row in traced.roles.parameters if row.role in _VECTORS]
    return {_siblings(row.name) for row in rows if row.name not in traced.scaled}


def _unreached_matrices(traced: TracedModel) -> list[str]:
    rows = [row for row in traced.roles.parameters if row.role in _MATRICES]
    return [row.name for row in rows if row.name not in traced.products]


def _siblings(name: str) -> str:
    """Return a name with its last number replaced by '*'."""
    return re.sub(r"^(.*\.|)\d+(?![^.])", r"\1*", name)
