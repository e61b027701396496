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
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from lightning_sv.interop.apply.parts import parts_of
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.consumers import Consumer
from lightning_sv.roles.graph import Node, Use, plain
from lightning_sv.roles.norms import Norms
from lightning_sv.roles.ops import CONVOLUTIONS, NORMS, SUMS
from lightning_sv.roles.types import ModelRole, agreed


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
        if self.transposed:
            return weight.mT
        return weight

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
        self._read_by_norms = _read_by_norms(traced)

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
        for product in self.traced.products[name]:
            is_itself = plain(product.value).op == "parameter"
            if not is_itself or product.node.op in CONVOLUTIONS:
                return False
        return True

    def branch(self, name: str) -> TracedBranch:
        """Return a plain matrix as a branch."""
        row = self.traced.roles[name]
        products = self.traced.products[name]
        transposed = row.in_axis != len(row.shape) - 1
        d_out = row.shape[-1 if transposed else -2]
        # all its products must show the same parts
        parts = agreed({parts_of(product, d_out) for product in products})
        return TracedBranch(
            weight=name,
            transposed=transposed,
            parts=parts or (d_out,),
            mixed=parts is None and row.role != "router",  # scores meet their choice of experts
            normalized=self._is_normalized(products),
            head_width=row.head_width,
            role=row.role,
        )

    def _is_normalized(self, products: list[Use]) -> bool:
        """Return True if a norm reads a product, also behind moves, casts and constant factors."""
        for product in products:
            for output in (product.node, self.traced.flow.norms.base(product.node)):
                if output in self._read_by_norms:
                    return True
        return False


def _tied_parameters(traced: TracedModel) -> set[str]:
    """Return the names of parameters that several modules have, or that are also embeddings.

    One that a module uses at several places is not tied to another. A table that a function reads,
    not a layer, belongs to one module only.
    """
    owners: Counter[nn.Parameter | None] = Counter()
    for module in traced.model.modules():
        owners.update(module._parameters.values())

    tied = set()
    for name, parameter in traced.named.items():
        is_matrix = name in traced.products
        is_table = "embedding" in traced.use_roles.get(name, ())
        if owners[parameter] > 1 or (is_matrix and is_table):
            tied.add(name)
    return tied


def _read_by_norms(traced: TracedModel) -> set[Node]:
    """Return the values that norms read; of a sum with a bias also its terms."""
    read: set[Node] = set()
    for node in traced.flow.graph.nodes:
        source = _input_of_norm(node, traced.flow.norms)
        if source is None or source.size != node.first.size:  # a norm of a part
            continue
        read.add(source)
        if source.op in SUMS:
            read.update(source.values)
    return read


def _input_of_norm(node: Node, norms: Norms) -> Node | None:
    """Return x of a norm's operation, or of the statistic |x| that a norm by hand begins with."""
    if node.op in NORMS:
        return norms.base(node.first)
    if norms.is_statistic(node) and not any(map(norms.is_statistic, node.values)):
        return norms.powers[node].x
    return None
