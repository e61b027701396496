"""Norms without a scale vector that only matrices read.

Some models normalize without a vector, such as OLMo with its LayerNorm without parameters. A
strategy then adds one before each matrix. Only a norm of whole rows has a channel per column of
these matrices:

    xhat -> W1, W2          vectors before W1 and W2
    xhat -> W1, + residual  none: the residual stream reads xhat, too
"""

from lightning_sv.interop.apply.matrices import Matrices, TracedBranch
from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers
from lightning_sv.roles.graph import Node
from lightning_sv.roles.norms import Norms, ScaledValue
from lightning_sv.roles.ops import NORMS


def bare_norms(matrices: Matrices) -> list[TracedNorm]:
    """Return the norms without a vector, with the matrices that can have vectors."""
    traced = matrices.traced
    scaled = _scaled_values(traced)
    norms = []
    for node in traced.flow.graph.nodes:
        is_bare = node in traced.flow.norms.normalized and node not in scaled
        if not is_bare or not _is_of_rows(node, traced.flow.norms):
            continue
        readers = _linear_consumers(node)
        if readers:
            norms.append(_traced_norm(node, readers, matrices))
    return norms


def _scaled_values(traced: TracedModel) -> set[Node]:
    """Return the values that scale vectors multiply."""
    scaled: set[Node] = set()
    for values in traced.scaled.values():
        for product, factor in values:
            scaled.update(map(traced.flow.norms.base, product.others(factor)))
    return scaled


def _is_of_rows(norm: Node, norms: Norms) -> bool:
    """Return True for a norm over the last axis alone."""
    if norm.is_fixed or norm.shape[-1] < 2:
        return False
    if norm.op in NORMS:
        return len(norm.scalars.get("normalized_shape", ())) == 1
    statistics = filter(norms.is_statistic, norm.values)
    return any(map(_is_one_per_row, statistics))


def _is_one_per_row(statistic: Node) -> bool:
    """Return True for one number per row, also if it is expanded to all channels."""
    return statistic.shape[-1:] == (1,) or statistic.stride[-1:] == (0,)


def _linear_consumers(norm: Node) -> list[Consumer]:
    """Return the linear maps over the channels of a norm; empty if anything else reads it."""
    ones = Node("parameter", norm.shape[-1:], (1,))
    try:
        readers = list(consumers([ScaledValue(norm, ones)], "a bare norm"))
    except UnknownConsumerError:
        return []
    for reader in readers:
        if not reader.along_channels:
            return []
    return readers


def _traced_norm(norm: Node, readers: list[Consumer], matrices: Matrices) -> TracedNorm:
    """Return a norm that linear maps read."""
    products = {reader.node for reader in readers}
    tied: list[str] = []
    branches: list[TracedBranch] = []
    unfit: list[str] = []
    for name in matrices.names_read(readers):
        if name in matrices.tied:
            tied.append(name)
        elif _reads_alone(norm, name, products, matrices):
            branches.append(matrices.branch(name))
        else:
            unfit.append(name)
    return TracedNorm(
        "", 1.0, "input", branches=tuple(branches), tied=tuple(tied), unfit=tuple(unfit)
    )


def _reads_alone(norm: Node, name: str, products: set[Node], matrices: Matrices) -> bool:
    """Return True for a plain matrix that reads a norm's channels and nothing else."""
    own_products = {product.node for product in matrices.traced.products[name]}
    if not own_products <= products or not matrices.is_plain(name):
        return False
    return matrices.width_read(name) == norm.shape[-1]
