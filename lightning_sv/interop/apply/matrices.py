"""The matrices of a traced model, as scale vectors next to them see them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightning_sv.interop.apply.parts import Layout, layout_of
from lightning_sv.roles.api import Product, TracedModel
from lightning_sv.roles.consumers import Consumer
from lightning_sv.roles.graph import Node, plain
from lightning_sv.roles.norms import stem
from lightning_sv.roles.ops import CONVOLUTIONS, NORMS, SUMS
from lightning_sv.roles.types import ModelParameter, ModelRole


class SiteMatrix(NamedTuple):
    """A matrix that reads the output of a scale vector.

    Attributes:
        weight: name of the parameter, (*batch_dims, d_out, d_in) or (*batch_dims, d_in, d_out)
        in_axis: axis that its product sums over
        parts: widths of the matrices concatenated in it, such as queries, keys and values
        mixed: whether it has several matrices that cannot be separated into blocks of rows
        normalized: whether its product is already normalized
        head_width: width of the heads into which its product is viewed
        role: matrix, router or head
    """

    weight: str
    in_axis: int
    parts: tuple[int, ...]
    mixed: bool
    normalized: bool
    head_width: int | None
    role: ModelRole

    @property
    def word(self) -> str:
        """Last part of its name: 'q_proj' of 'model.layers.0.self_attn.q_proj.weight'."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]


class Matrices:
    """The matrices of a traced model.

    Attributes:
        tied: names of parameters that several modules have, or that are also embeddings
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.tied = _tied_parameters(traced)
        self._normalized = _normalized_products(traced)

    def names_read(self, ends: Iterable[Consumer]) -> list[str]:
        """Return the names of the matrices of linear maps, in the model's order."""
        sources = self.traced.flow.sources
        names = frozenset[str]().union(*(sources[end.matrix] for end in ends if end.matrix))
        return [name for name in self.traced.named if name in names]

    def width_read(self, matrix: SiteMatrix) -> int:
        """Return the number of channels that a matrix reads."""
        return self.traced.named[matrix.weight].shape[matrix.in_axis]

    def find(self, name: str) -> SiteMatrix | None:
        """Return a matrix that can have vectors; None for a function of one, or a convolution."""
        row = self.traced.roles[name]
        products = self.traced.products[name]
        if row.in_axis is None or not _is_plain(row, products):
            return None
        layout = _layout(row, products)
        norms = self._norms_after(products)
        is_one = len(row.shape) == 2 and len(layout.parts) == 1
        has_several = layout.mixed or (is_one and norms == {False})  # one has a norm
        return SiteMatrix(
            weight=name,
            in_axis=row.in_axis,
            parts=layout.parts,
            mixed=has_several and row.role != "router",  # scores meet their own choice of experts
            normalized=True in norms,
            head_width=row.head_width,
            role=row.role,
        )

    def _norms_after(self, products: list[Product]) -> set[bool]:
        """Return for the norms that read products whether they read all channels."""
        read: set[Node] = set()
        for product in products:
            read |= {product.node, stem(product.node)}
        return {self._normalized[node] for node in read if node in self._normalized}


def _tied_parameters(traced: TracedModel) -> set[str]:
    """Return the names of parameters that several modules have, or that are also embeddings.

    One that a module uses at several places is not tied to another. A table that a function reads,
    not a layer, belongs to one module only.
    """
    owners: Counter[int] = Counter()
    for module in traced.model.modules():
        owners.update(id(parameter) for parameter in module._parameters.values())
    tied = {name for name, parameter in traced.named.items() if owners[id(parameter)] > 1}
    return tied | {name for name in traced.products if "embedding" in traced.uses[name]}


def _normalized_products(traced: TracedModel) -> dict[Node, bool]:
    """Return input of a norm, which may be a sum -> whether norms read all of it."""
    normalized: dict[Node, bool] = {}
    for source, value in _read_by_norms(traced):
        reads_all = math.prod(value.shape) == math.prod(source.shape)
        before_bias = source.values if source.op in SUMS else []
        for node in (source, *before_bias):
            normalized[node] = reads_all or normalized.get(node, False)
    return normalized


def _read_by_norms(traced: TracedModel) -> Iterator[tuple[Node, Node]]:
    """Yield x and the part of it that a norm reads, for each norm of x."""
    statistics = traced.flow.norms.statistics
    for node, statistic in statistics.items():
        if statistics.keys().isdisjoint(node.values):  # not a power of a different statistic
            yield statistic.of, node.first
    for node in traced.flow.graph.nodes:
        if node.op in NORMS:
            yield stem(node.first), node.first


def _layout(row: ModelParameter, products: list[Product]) -> Layout:
    """Return the matrices in a weight, which all its products must show alike."""
    d_out = row.shape[-2] if row.in_axis == len(row.shape) - 1 else row.shape[-1]
    layouts = {layout_of(product.node, product.argument, d_out) for product in products}
    return layouts.pop() if len(layouts) == 1 else Layout((d_out,), mixed=True)


def _is_plain(row: ModelParameter, products: list[Product]) -> bool:
    """Return True for a matrix, or one per expert, that linear maps read as it is.

    Vectors do not commute with a function of a matrix.
    """
    axes = len(row.shape)
    if axes not in (2, 3) or row.in_axis not in (axes - 1, axes - 2):
        return False
    operands = {plain(product.operand).op for product in products}
    reads = {product.node.op for product in products}
    return operands == {"parameter"} and reads.isdisjoint(CONVOLUTIONS)
