"""Norms without a scale vector that only matrices read."""

from collections.abc import Iterator

from lightning_sv.interop.apply.matrices import Matrices, SiteMatrix
from lightning_sv.interop.apply.site import Site
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers
from lightning_sv.roles.graph import Node
from lightning_sv.roles.norms import stem
from lightning_sv.roles.ops import NORMS


def bare_sites(matrices: Matrices) -> list[Site]:
    """Return a site per norm, with the matrices that can have vectors."""
    sites = []
    for norm in _bare_norms(matrices.traced):
        ends = _linear_ends(norm)
        if ends:
            sites.append(_site(norm, ends, matrices))
    return sites


def _bare_norms(traced: TracedModel) -> Iterator[Node]:
    """Yield the outputs of norms over the last axis that no scale vector multiplies."""
    scaled: set[Node] = set()
    for uses in traced.scaled.values():
        for node, vector in uses:
            scaled.update(map(stem, node.others(vector)))
    for node in traced.flow.graph.nodes:
        is_bare = node in traced.flow.normalized and node not in scaled
        if is_bare and not node.is_fixed and _is_of_rows(node, traced):
            yield node


def _is_of_rows(norm: Node, traced: TracedModel) -> bool:
    """Return True for a norm over the last axis alone."""
    if norm.shape[-1] < 2:
        return False
    if norm.op in NORMS:
        return len(norm.scalars.get("normalized_shape", ())) == 1
    statistics = [value for value in norm.values if value in traced.flow.norms.statistics]
    return any(v.shape[-1:] == (1,) or v.stride[-1:] == (0,) for v in statistics)


def _linear_ends(norm: Node) -> list[Consumer]:
    """Return the linear maps over the channels of a norm; empty if anything else reads it."""
    ones = Node("parameter", [], norm.shape[-1:], (1,))
    try:
        ends = list(consumers([(norm, ones)], "a bare norm", through_gates=False))
    except UnknownConsumerError:
        return []
    return ends if all(end.along_channels for end in ends) else []


def _site(norm: Node, ends: list[Consumer], matrices: Matrices) -> Site:
    products = {end.node for end in ends}
    names = matrices.names_read(ends)
    tied = [name for name in names if name in matrices.tied]
    found: list[SiteMatrix] = []
    unfit: list[str] = []
    for name in names:
        if name in tied:
            continue
        matrix = _matrix_behind(norm, name, products, matrices)
        if matrix is None:
            unfit.append(name)
        else:
            found.append(matrix)
    return Site("", 1.0, "input", matrices=tuple(found), tied=tuple(tied), unfit=tuple(unfit))


def _matrix_behind(
    norm: Node, name: str, products: set[Node], matrices: Matrices
) -> SiteMatrix | None:
    """Return a matrix that reads a norm's channels and nothing else; None for others."""
    matrix = matrices.find(name)
    all_products = {product.node for product in matrices.traced.products[name]}
    if matrix is None or not all_products <= products:
        return None
    return matrix if matrices.width_read(matrix) == norm.shape[-1] else None
