"""Where a traced model has scale vectors, and which matrices read them."""

from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles import Roles
from lightning_sv.roles.channels import moved
from lightning_sv.roles.classify import Classifier
from lightning_sv.roles.consumers import UnknownConsumerError, consumers
from lightning_sv.roles.dataflow import plain, stem, value_at
from lightning_sv.roles.ops import ATTENTION, COPIES, NORMS, PRODUCTS, SUMS
from lightning_sv.roles.trace import CONST, DATA, PARAM, Node
from lightning_sv.roles.types import ModelParameter


@dataclass(frozen=True)
class Reader:
    """A matrix that reads a scale vector's values.

    Attributes:
        weight: name of the parameter, (*batch_dims, d_out, d_in) or (*batch_dims, d_in, d_out)
        in_axis: the axis that its product sums over
        parts: widths of the matrices that are stored in it one after the other, as of queries, keys and values
        mixed: it holds several matrices whose rows alternate, or are found in no other way
        normalized: its product goes through a norm already
        head_width: width of the heads into which its product is viewed
        router: it chooses experts
    """

    weight: str
    in_axis: int
    parts: tuple[int, ...]
    mixed: bool
    normalized: bool
    head_width: int | None
    router: bool

    @property
    def word(self) -> str:
        """Its name in ScaleOptions: 'q_proj' of 'model.layers.0.self_attn.q_proj.weight'."""
        words = [word for word in self.weight.removesuffix(".weight").split(".") if not word.isdigit()]
        return words[-1] if words else self.weight


@dataclass(frozen=True)
class Site:
    """A scale vector of the model, or a norm that has none.

    Attributes:
        vector: name of the parameter; '' of a norm that has none
        origin: gamma is the parameter plus this, 0 or 1; None where it is neither
        role: 'input' or 'output'
        bias: name of the bias that its norm adds
        readers: the matrices; none of an output vector
        tied: names of matrices that read it and are another parameter too, as of an embedding
        stays: why they cannot take the vector up; '' where they can
        unfit: of a norm without vector, names of matrices that read it and cannot have one
    """

    vector: str
    origin: float | None
    role: str
    bias: str | None
    readers: tuple[Reader, ...]
    tied: tuple[str, ...]
    stays: str
    unfit: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the parameters that a plan may change."""
        return [name for name in (self.vector, self.bias, *(reader.weight for reader in self.readers)) if name]


def find_sites(
    model: nn.Module, trace: Classifier, roles: Roles, known: frozenset[str] = frozenset(), *, bare: bool = False
) -> list[Site]:
    """Return the model's scale vectors, in its own order.

    Args:
        model: the one that was traced
        trace: what its parameters do
        roles: of all of them
        known: names whose roles were given; those that the pass did not reach have no site
        bare: if True, return norms without scale vector too, if matrices alone read them

    Raises:
        ConfigError: no token of the example reached a matrix of which it is not known what it reads
    """
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    tied = {name for name, parameter in model.named_parameters() if owners[id(parameter)] > 1}
    tied |= {name for name in trace.products if "embedding" in trace.uses[name]}  # read by a function, not a layer
    normalized = _normalized_products(trace)
    sites = []
    for row in roles.parameters:
        if row.role not in ("input", "output") or (row.name in known and row.name not in trace.scaled):
            continue
        biases = {_bias(node, row.shape, trace) for node, _ in trace.scaled.get(row.name, ())}
        readers: tuple[Reader, ...] = ()
        shared: tuple[str, ...] = ()
        stays = "" if row.redundant else "matrices cannot take it up"
        if row.role == "input":
            ends = consumers(trace.scaled.get(row.name, ()), row.name, through_gates=False)
            names = {name for end in ends if end.matrix is not None for name in trace.flow.sources[end.matrix]}
            found = [_reader(name, trace, roles, normalized) for name in names]
            if any(reader is None for reader in found):
                stays = "a convolution, a function of a matrix or another product than a matrix's reads it"
            readers = tuple(
                sorted((r for r in found if r is not None), key=lambda r: list(trace.named).index(r.weight))
            )
            for reader in readers:
                if reader.weight in tied:
                    stays = f"{reader.word} is tied, and read elsewhere too"
                elif trace.named[reader.weight].shape[reader.in_axis] != row.shape[-1] or len(row.shape) != 1:
                    stays = f"{reader.word} reads it with another width"
            shared = tuple(sorted({reader.weight for reader in readers if reader.weight in tied}))
            readers = tuple(reader for reader in readers if reader.weight not in tied)
        if row.name in tied:
            stays = "it is tied to another parameter"
        if len(biases) > 1:
            stays = "what is added behind it is not always the same"
        bias = biases.pop() if len(biases) == 1 else None
        sites.append(Site(row.name, _origin(row, trace), row.role, bias, readers, shared, stays))
    if bare:
        sites += _bare_sites(trace, roles, tied, normalized)
    return _with_siblings(sites, trace, roles, known)


def _bare_sites(trace: Classifier, roles: Roles, tied: set[str], normalized: set[Node]) -> list[Site]:
    """Return the norms without scale vector that matrices alone read; one site of those that share a matrix."""
    read: list[tuple[set[str], set[Node], int]] = []  # matrices, their products, width
    for norm in _bare_norms(trace):
        ones = Node("parameter", [], norm.shape[-1:], (1,))
        try:
            ends = list(consumers([(norm, ones)], "a norm without scale vector", through_gates=False))
        except UnknownConsumerError:
            continue
        if not ends or any(end.matrix is None or not end.along_channels for end in ends):
            continue
        names = {name for end in ends if end.matrix is not None for name in trace.flow.sources[end.matrix]}
        products, width = {end.node for end in ends}, norm.shape[-1]
        for other in [other for other in read if other[0] & names and other[2] == width]:
            read.remove(other)
            names, products = names | other[0], products | other[1]
        read.append((names, products, width))
    sites = []
    for names, products, width in read:
        ordered = [name for name in trace.named if name in names]
        found = {name: _reader(name, trace, roles, normalized) for name in ordered if name not in tied}
        fits = {
            name: reader
            for name, reader in found.items()
            if reader is not None
            and trace.named[name].shape[reader.in_axis] == width
            and {product for product, _, _ in trace.products[name]} <= products
        }
        shared = tuple(name for name in ordered if name in tied)
        unfit = tuple(name for name in found if name not in fits)
        sites.append(Site("", 1.0, "input", None, tuple(fits.values()), shared, "", unfit))
    return sites


def _bare_norms(trace: Classifier) -> list[Node]:
    """Return what norms over the last axis give, where no scale vector multiplies it."""
    scaled = {stem(other) for uses in trace.scaled.values() for node, vector in uses for other in node.others(vector)}
    found = []
    for node in trace.graph.nodes:
        if node.kind in (CONST, PARAM) or node not in trace.flow.normalized or node in scaled:
            continue
        inputs = [value for _, value in node.inputs]
        of_rows = [value for value in inputs if value in trace.flow.statistics and value.shape[-1:] == (1,)]
        one_axis = len(node.scalars.get("normalized_shape", ())) == 1
        if (one_axis if node.op in NORMS else of_rows) and node.shape[-1] > 1:
            found.append(node)
    return found


def _origin(row: ModelParameter, trace: Classifier) -> float | None:
    """Return what is added to a parameter for gamma; None where gamma is another function, or a part, of it."""
    if row.name not in trace.scaled:  # one of an expert that no token reached
        return row.decays_to
    if "bias" in trace.uses[row.name]:  # a table of gammas and biases
        return None
    found = {(value_at(factor, 0.0), value_at(factor, 1.0)) for _, factor in trace.scaled[row.name]}
    zero, one = found.pop() if len(found) == 1 else (None, None)
    return zero if zero is not None and one == zero + 1 else None


def _bias(node: Node, vector: tuple[int, ...], trace: Classifier) -> str | None:
    """Return the parameter that a norm adds to `node`, scaled by a vector of that shape; None for none."""
    added = [node.argument(NORMS[node.op][2])] if node.op in NORMS else []
    values = [] if node.op in NORMS else [node]
    for value in values:  # and what is appended meanwhile
        for _, reader in value.users:
            if reader.op in SUMS:
                added += reader.others(value)
            elif reader.is_view or reader.op in COPIES:
                values.append(reader)
    names = {name for value in added if value is not None and value.kind == PARAM for name in trace.flow.sources[value]}
    alike = [name for name in names if tuple(trace.named[name].shape) == vector]
    return alike[0] if len(alike) == 1 else None


def _normalized_products(trace: Classifier) -> set[Node]:
    """Return what norms read: products among them need no second norm."""
    of = {of for of, _ in trace.flow.statistics.values()}
    of |= {stem(node.inputs[0][1]) for node in trace.graph.nodes if node.op in NORMS}
    return of | {value for node in of if node.op in SUMS for _, value in node.inputs}  # before a bias


def _reader(name: str, trace: Classifier, roles: Roles, normalized: set[Node]) -> Reader | None:
    row, uses = roles[name], trace.products[name]
    if any(plain(operand).op != "parameter" for _, operand, _ in uses):
        return None  # a function of it is used, as its direction alone, which no vector beside it commutes with
    if (
        row.in_axis is None
        or len(row.shape) not in (2, 3)
        or any("conv" in p.op or len(PRODUCTS[p.op]) > 2 for p, _, _ in uses)
    ):
        return None
    if row.in_axis < len(row.shape) - 2:
        return None
    d_out = row.shape[2 * len(row.shape) - 3 - row.in_axis]
    found = {_parts(product, argument, d_out) for product, _, argument in uses}
    parts, mixed = found.pop() if len(found) == 1 else ((d_out,), True)
    taken = any(stem(product) in normalized or product in normalized for product, _, _ in uses)
    return Reader(name, row.in_axis, parts, mixed, taken, row.head_width, row.role == "router")


def _parts(product: Node, argument: str, d_out: int) -> tuple[tuple[int, ...], bool]:
    """Return the widths into which a product's channels are cut, and whether they are mixed otherwise."""
    axis = len(product.shape) - (1 if argument == PRODUCTS[product.op][1] else 2)
    if product.shape[axis] != d_out:
        return (d_out,), True
    queue, cuts, mixed = [(product, axis)], {0, d_out}, False
    while queue:
        value, axis = queue.pop()
        for _, reader in value.users:
            along = _along(reader, value)
            if reader.op in ("split", "split_with_sizes") and along == axis:
                sizes = reader.scalars.get("split_sizes") or reader.scalars.get("split_size")
                widths = sizes if isinstance(sizes, (list, tuple)) else [int(str(sizes))] * (d_out // int(str(sizes)))
                cuts |= {sum(widths[:i]) for i in range(len(widths))}
            elif reader.op == "glu" and along == axis:
                cuts.add(d_out // 2)
            elif reader.op == "slice" and along == axis:
                mixed |= int(reader.scalars.get("step") or 1) != 1
                ends = (reader.scalars.get("start") or 0, reader.scalars.get("end"))
                cuts |= {min(d_out, d_out if at is None else at + d_out if at < 0 else at) for at in ends}
            elif reader.is_view or reader.op in COPIES or (reader.pointwise and _is_alone(value, reader)):
                after = moved(value, reader, frozenset({axis}))
                if len(after) == 1 and len(reader.shape) <= 3 and reader.shape[min(after)] == d_out:
                    queue.append((reader, min(after)))
                elif len(after) > 1 and reader.is_view and _taken_apart(reader, min(after)):
                    n = reader.shape[min(after)]
                    cuts |= {i * d_out // n for i in range(n)}
    bounds = sorted(cuts)
    parts = tuple(high - low for low, high in pairwise(bounds))
    return ((d_out,), True) if mixed else (parts, len(parts) == 1 and _meets_itself(product))


def _along(reader: Node, value: Node) -> int | None:
    """Return the axis of `value` along which a view, or glu, cuts it."""
    if not value.shape or not (reader.is_view or reader.op == "glu"):
        return None
    return int(reader.scalars.get("dim", -1 if reader.op == "glu" else 0)) % len(value.shape)


def _taken_apart(view: Node, axis: int) -> bool:
    """Whether two or three matrices, stored one after the other, lie along an axis: one is chosen of them."""
    queue = [(view, axis)] if view.shape[axis] in (2, 3) else []
    while queue:
        value, axis = queue.pop()
        for _, reader in value.users:
            if reader.op in ("unbind", "select") and _along(reader, value) == axis:
                return True
            if reader.is_view or reader.op in COPIES:
                after = moved(value, reader, frozenset({axis}))
                if len(after) == 1 and reader.shape[min(after)] == value.shape[axis]:
                    queue.append((reader, min(after)))
    return False


def _is_alone(value: Node, reader: Node) -> bool:
    """Whether no other activations meet `value` in `reader`."""
    return all(other.kind in (CONST, PARAM) for other in reader.others(value))


def _meets_itself(product: Node) -> bool:
    """Whether two arguments of attention, or of a product of activations, come from this one product."""
    queue, seen = [product], {product}
    met: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    while queue:
        value = queue.pop()
        for argument, reader in value.users:
            if (reader.op in PRODUCTS and "conv" not in reader.op) or reader.op in ATTENTION:
                if all(other.kind != PARAM for other in reader.others(value)):
                    arguments = met.setdefault((reader.op, tuple(id(node) for _, node in reader.inputs)), set())
                    arguments.add(argument)
                    if len(arguments) > 1:
                        return True
            elif reader not in seen and (reader.op != "mul" or set(reader.others(value)) <= seen | _known(reader)):
                seen.add(reader)  # a factor of others, as a gate, is one matrix however many it meets
                queue.append(reader)
    return False


def _known(reader: Node) -> set[Node]:
    return {node for _, node in reader.inputs if node.kind != DATA}


def _with_siblings(sites: list[Site], trace: Classifier, roles: Roles, known: frozenset[str]) -> list[Site]:
    """Add experts that no token reached beside their siblings, from which they differ in the last number alone."""
    of = {_siblings(reader.weight): (i, reader) for i, site in enumerate(sites) for reader in site.readers}
    extra: dict[int, list[Reader]] = {}
    for row in roles.parameters:
        if row.role in ("matrix", "router", "head") and row.name not in trace.products:
            if not any(_any_number(row.name) == _any_number(name) for name in of):
                continue
            if _siblings(row.name) not in of:
                if row.name in known:
                    continue
                raise ConfigError(
                    f"no token of the example reached {row.name}, so that it is not known which scale vector it reads; "
                    "pass an example with more tokens."
                )
            i, like = of[_siblings(row.name)]
            extra.setdefault(i, []).append(replace(like, weight=row.name))
    return [replace(site, readers=(*site.readers, *extra.get(i, ()))) for i, site in enumerate(sites)]


def _siblings(name: str) -> str:
    """Return a name with '*' for its last number."""
    words = name.split(".")
    last = max((i for i, word in enumerate(words) if word.isdigit()), default=None)
    return name if last is None else ".".join("*" if i == last else word for i, word in enumerate(words))


def _any_number(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
