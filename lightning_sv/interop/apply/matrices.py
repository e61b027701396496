"""The matrices of a traced model, as scale vectors next to them see them.

A scale vector of a matrix W is a factor diag(gamma) on one side of it. The uses of W in the pass
decide whether it can have one, and how many:

    mm(x, W)                one matrix, gamma_in (d_in) and gamma_out (d_out)
    mm(x, W) -> split       several matrices in one weight, each with its own vectors (`parts.py`)
    bmm(x, W)               one matrix per expert, and a row of each vector per expert
    mm(x, tanh(W)), conv    none: a function of W, or no product with it
    tied                    none: the other module would have the vector, too
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from lightning_sv.interop.apply.parts import parts_of
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.consumers import Consumer
from lightning_sv.roles.graph import Node, Use, plain
from lightning_sv.roles.ops import CONVOLUTIONS, NORMS, SUMS
from lightning_sv.roles.types import ModelParameter, ModelRole, agreed


class TracedBranch(NamedTuple):
    """A matrix that reads the output of a norm.

    Attributes:
        weight: name of the parameter, (*batch_dims, d_out, d_in) or (*batch_dims, d_in, d_out)
        transposed: whether it is stored as (*batch_dims, d_in, d_out)
        parts: widths of the matrices concatenated in it, such as queries, keys and values
        mixed: whether it has several matrices that cannot be separated into blocks of rows
        normalized: whether its product is already normalized
        head_width: width of the heads into which its product is viewed
        role: matrix, router or head
    """

    weight: str
    transposed: bool
    parts: tuple[int, ...]
    mixed: bool
    normalized: bool
    head_width: int | None
    role: ModelRole

    def rows(self, weight: Tensor) -> Tensor:
        """Return a tensor in the weight's layout as (*batch_dims, d_out, d_in), or back."""
        return weight.mT if self.transposed else weight

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
        #: values of which a norm reads all channels
        self._normalized: set[Node] = set()
        #: values of which a norm reads some channels, such as queries and keys of three matrices
        #: in one weight
        self._normalized_in_part: set[Node] = set()
        self._find_inputs_of_norms()

    def _find_inputs_of_norms(self) -> None:
        for source, value in _read_by_norms(self.traced):
            reads_all = value.size == source.size
            inputs = self._normalized if reads_all else self._normalized_in_part
            inputs.add(source)
            if source.op in SUMS:  # the norm follows a bias
                inputs.update(source.values)

    def names_read(self, readers: Iterable[Consumer]) -> list[str]:
        """Return the names of the matrices of linear maps, in the model's order."""
        sources = self.traced.flow.sources
        names: set[str] = set()
        for reader in readers:
            if reader.matrix is not None:
                names |= sources[reader.matrix]
        return [name for name in self.traced.named if name in names]

    def width_read(self, name: str) -> int:
        """Return the number of channels that a plain matrix reads."""
        row = self.traced.roles[name]
        assert row.in_axis is not None
        return row.shape[row.in_axis]

    def is_plain(self, name: str) -> bool:
        """Return True for a matrix, or one per expert, that linear maps read as it is.

        Vectors do not commute with a function of a matrix.
        """
        row = self.traced.roles[name]
        axes = len(row.shape)
        if axes not in (2, 3) or row.in_axis not in (axes - 1, axes - 2):
            return False
        products = self.traced.products[name]
        operands = {plain(product.value).op for product in products}
        reads = {product.node.op for product in products}
        return operands == {"parameter"} and reads.isdisjoint(CONVOLUTIONS)

    def branch(self, name: str) -> TracedBranch:
        """Return a plain matrix as a branch."""
        row = self.traced.roles[name]
        products = self.traced.products[name]
        transposed = row.in_axis != len(row.shape) - 1
        d_out = row.shape[-1 if transposed else -2]
        # all its products must show the same parts
        parts = agreed({parts_of(product, d_out) for product in products})
        outputs = self._outputs(products)
        is_normalized = not outputs.isdisjoint(self._normalized)
        in_part = not outputs.isdisjoint(self._normalized_in_part)
        return TracedBranch(
            weight=name,
            transposed=transposed,
            parts=parts or (d_out,),
            mixed=_is_mixed(row, parts, normalized_in_part=in_part and not is_normalized),
            normalized=is_normalized,
            head_width=row.head_width,
            role=row.role,
        )

    def _outputs(self, products: list[Use]) -> set[Node]:
        """Return the products, also without moves, casts and constant factors."""
        nodes = {product.node for product in products}
        return nodes.union(map(self.traced.flow.norms.base, nodes))


def _is_mixed(
    row: ModelParameter, parts: tuple[int, ...] | None, *, normalized_in_part: bool
) -> bool:
    """Return True if a weight has several matrices that cannot be separated.

    A norm that reads only a part of its result shows that, too.
    """
    if row.role == "router":  # scores meet their own choice of experts
        return False
    if parts is None:
        return True
    has_experts = len(row.shape) > 2
    if has_experts or len(parts) > 1:
        return False
    return normalized_in_part


def _tied_parameters(traced: TracedModel) -> set[str]:
    """Return the names of parameters that several modules have, or that are also embeddings.

    One that a module uses at several places is not tied to another. A table that a function reads,
    not a layer, belongs to one module only.
    """
    owners: Counter[int] = Counter()
    for module in traced.model.modules():
        owners.update(map(id, module._parameters.values()))
    tied = set()
    for name, parameter in traced.named.items():
        is_table = name in traced.products and "embedding" in traced.use_roles[name]
        if is_table or owners[id(parameter)] > 1:
            tied.add(name)
    return tied


def _read_by_norms(traced: TracedModel) -> Iterator[tuple[Node, Node]]:
    """Yield x and the part of it that a norm reads, for each norm of x."""
    norms = traced.flow.norms
    for node in traced.flow.graph.nodes:
        if node.op in NORMS:
            yield norms.base(node.first), node.first
        elif norms.is_statistic(node) and not any(map(norms.is_statistic, node.values)):
            yield norms.powers[node].x, node.first
