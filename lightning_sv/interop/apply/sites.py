"""Scale vectors of a traced model and the matrices that read them."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles import Roles, family
from lightning_sv.roles.channels import moved
from lightning_sv.roles.classify import Classifier
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers
from lightning_sv.roles.dataflow import plain, stem, value_at
from lightning_sv.roles.ops import ATTENTION, COPIES, NORMS, PRODUCTS, SUMS
from lightning_sv.roles.trace import CONST, DATA, PARAM, Node, Walk
from lightning_sv.roles.types import ModelParameter


@dataclass(frozen=True)
class SiteMatrix:
    """A matrix that reads the output of a scale vector.

    Attributes:
        weight: name of the parameter, (*batch_dims, d_out, d_in) or (*batch_dims, d_in, d_out)
        in_axis: axis that its product sums over
        parts: widths of the matrices concatenated in it, such as queries, keys and values
        mixed: True if it has several matrices that cannot be separated into blocks of rows
        normalized: True if its product is already normalized
        head_width: width of the heads into which its product is viewed
        router: True if it selects experts
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
        """Name in ScaleOptions: 'q_proj' of 'model.layers.0.self_attn.q_proj.weight'."""
        parts = [part for part in self.weight.removesuffix(".weight").split(".") if not part.isdigit()]
        return parts[-1] if parts else self.weight


@dataclass(frozen=True)
class Site:
    """A scale vector of the model, or a norm without one.

    Attributes:
        vector: name of the parameter; '' for a norm without one
        origin: gamma is the parameter plus this, 0 or 1; None if it is neither
        role: 'input' or 'output'
        bias: name of the bias that its norm adds
        matrices: matrices that read it; empty for an output vector
        tied: names of matrices that read it and are tied to another parameter, such as an embedding
        stays: reason why it cannot be folded into the matrices; '' if it can
        unfit: for a norm without vector, names of matrices that read it and cannot have one
    """

    vector: str
    origin: float | None
    role: str
    bias: str | None
    matrices: tuple[SiteMatrix, ...]
    tied: tuple[str, ...]
    stays: str
    unfit: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the parameters that a plan may change."""
        return [name for name in (self.vector, self.bias, *(matrix.weight for matrix in self.matrices)) if name]


def find_sites(
    model: nn.Module, trace: Classifier, roles: Roles, known: frozenset[str] = frozenset(), *, bare: bool = False
) -> list[Site]:
    """Return the model's scale vectors, in its own order.

    Args:
        model: the traced model
        trace: trace of the model
        roles: roles of all parameters
        known: names with given roles; those not reached by the forward pass have no site
        bare: if True, also return norms without scale vector, if only matrices read them

    Raises:
        ConfigError: no token of the example reached a matrix, so that its inputs are unknown
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {name for name, parameter in model.named_parameters() if owners[id(parameter)] > 1}
    tied |= {name for name in trace.products if "embedding" in trace.uses[name]}  # read by a function, not a layer
    normalized = _normalized_products(trace)
    sites = []
    for row in roles.parameters:
        if row.role not in ("input", "output") or (row.name in known and row.name not in trace.scaled):
            continue
        matrices: list[SiteMatrix] = []
        stays = "" if row.redundant else "matrices cannot absorb it"
        if row.role == "input":
            candidates = [
                _matrix(name, trace, roles, normalized) for name in _names_read(trace.consumers_of(row.name), trace)
            ]
            matrices = [matrix for matrix in candidates if matrix is not None]
            if len(matrices) < len(candidates):
                stays = "it is read by a convolution, a function of a matrix or another product"
            for matrix in matrices:
                if matrix.weight in tied:
                    stays = f"{matrix.word} is tied and read elsewhere"
                elif trace.named[matrix.weight].shape[matrix.in_axis] != row.shape[-1] or len(row.shape) != 1:
                    stays = f"{matrix.word} reads it with another width"
        if row.name in tied:
            stays = "it is tied to another parameter"
        biases = {_bias(node, row.shape, trace) for node, _ in trace.scaled.get(row.name, ())}
        if len(biases) > 1:
            stays = "different biases are added after it"
        bias = biases.pop() if len(biases) == 1 else None
        shared = tuple(sorted(matrix.weight for matrix in matrices if matrix.weight in tied))
        free = tuple(matrix for matrix in matrices if matrix.weight not in tied)
        sites.append(Site(row.name, _origin(row, trace), row.role, bias, free, shared, stays))
    if bare:
        sites += _bare_sites(trace, roles, tied, normalized)
    return _with_siblings(sites, trace, roles, known)


def _names_read(ends: Iterable[Consumer], trace: Classifier) -> list[str]:
    """Return the names of the matrices of linear maps, in the model's order."""
    names = {name for end in ends if end.matrix is not None for name in trace.flow.sources[end.matrix]}
    return [name for name in trace.named if name in names]


def _bare_sites(trace: Classifier, roles: Roles, tied: set[str], normalized: set[Node]) -> list[Site]:
    """Return the norms without scale vector that only matrices read; those that share a matrix form one site."""
    read: list[tuple[set[str], set[Node], int]] = []  # matrices, their products, width
    for norm in _bare_norms(trace):
        ones = Node("parameter", [], norm.shape[-1:], (1,))
        try:
            ends = list(consumers([(norm, ones)], "a norm without scale vector", through_gates=False))
        except UnknownConsumerError:
            continue
        if not ends or any(end.matrix is None or not end.along_channels for end in ends):
            continue
        names, products, width = set(_names_read(ends, trace)), {end.node for end in ends}, norm.shape[-1]
        for other in [other for other in read if other[0] & names and other[2] == width]:
            read.remove(other)
            names, products = names | other[0], products | other[1]
        read.append((names, products, width))
    sites = []
    for names, products, width in read:
        ordered = [name for name in trace.named if name in names]
        candidates = {name: _matrix(name, trace, roles, normalized) for name in ordered if name not in tied}
        fits = {
            name: matrix
            for name, matrix in candidates.items()
            if matrix is not None
            and trace.named[name].shape[matrix.in_axis] == width
            and {product for product, _, _ in trace.products[name]} <= products
        }
        shared = tuple(name for name in ordered if name in tied)
        unfit = tuple(name for name in candidates if name not in fits)
        sites.append(Site("", 1.0, "input", None, tuple(fits.values()), shared, "", unfit))
    return sites


def _bare_norms(trace: Classifier) -> list[Node]:
    """Return the outputs of norms over the last axis that no scale vector multiplies."""
    scaled = {stem(other) for uses in trace.scaled.values() for node, vector in uses for other in node.others(vector)}
    norms = []
    for node in trace.graph.nodes:
        if node.kind in (CONST, PARAM) or node not in trace.flow.normalized or node in scaled:
            continue
        inputs = [value for _, value in node.inputs]
        of_rows = [value for value in inputs if value in trace.flow.statistics and value.shape[-1:] == (1,)]
        one_axis = len(node.scalars.get("normalized_shape", ())) == 1
        if (one_axis if node.op in NORMS else of_rows) and node.shape[-1] > 1:
            norms.append(node)
    return norms


def _origin(row: ModelParameter, trace: Classifier) -> float | None:
    """Return the constant added to a parameter for gamma; None if gamma is another function, or a part, of it."""
    if row.name not in trace.scaled:  # a vector of an expert without tokens
        return row.decays_to
    if "bias" in trace.uses[row.name]:  # a table of gammas and biases
        return None
    values = {(value_at(factor, 0.0), value_at(factor, 1.0)) for _, factor in trace.scaled[row.name]}
    zero, one = values.pop() if len(values) == 1 else (None, None)
    return zero if zero is not None and one == zero + 1 else None


def _bias(node: Node, vector: tuple[int, ...], trace: Classifier) -> str | None:
    """Return the parameter of that shape that a norm adds to `node`; None if there is none."""
    added = [node.argument(NORMS[node.op][2])] if node.op in NORMS else []
    values = [] if node.op in NORMS else [node]
    for value in values:  # including values appended in the loop
        for _, user in value.users:
            if user.op in SUMS:
                added += user.others(value)
            elif user.is_view or user.op in COPIES:
                values.append(user)
    names = {name for value in added if value is not None and value.kind == PARAM for name in trace.flow.sources[value]}
    candidates = [name for name in names if tuple(trace.named[name].shape) == vector]
    return candidates[0] if len(candidates) == 1 else None


def _normalized_products(trace: Classifier) -> set[Node]:
    """Return the inputs of norms, including sums, which need no second norm."""
    normalized = {node for node, _ in trace.flow.statistics.values()}
    normalized |= {stem(node.inputs[0][1]) for node in trace.graph.nodes if node.op in NORMS}
    return normalized | {value for node in normalized if node.op in SUMS for _, value in node.inputs}  # before a bias


def _matrix(name: str, trace: Classifier, roles: Roles, normalized: set[Node]) -> SiteMatrix | None:
    row, uses = roles[name], trace.products[name]
    if any(plain(operand).op != "parameter" for _, operand, _ in uses):
        return None  # the product uses a function of it, which vectors do not commute with
    if row.in_axis is None or len(row.shape) not in (2, 3) or row.in_axis < len(row.shape) - 2:
        return None
    if any("conv" in p.op or len(PRODUCTS[p.op]) > 2 for p, _, _ in uses):
        return None
    d_out = row.shape[2 * len(row.shape) - 3 - row.in_axis]
    layouts = {_parts(product, argument, d_out) for product, _, argument in uses}
    parts, mixed = layouts.pop() if len(layouts) == 1 else ((d_out,), True)
    is_normalized = any(stem(product) in normalized or product in normalized for product, _, _ in uses)
    return SiteMatrix(name, row.in_axis, parts, mixed, is_normalized, row.head_width, row.role == "router")


def _parts(product: Node, argument: str, d_out: int) -> tuple[tuple[int, ...], bool]:
    """Return the widths into which a product's channels are split, and whether matrices are mixed otherwise."""
    axis = len(product.shape) - (1 if argument == PRODUCTS[product.op][1] else 2)
    if product.shape[axis] != d_out:
        return (d_out,), True
    queue, cuts, mixed = [(product, axis)], {0, d_out}, False
    while queue:
        value, axis = queue.pop()
        for _, user in value.users:
            along = _along(user, value)
            if user.op in ("split", "split_with_sizes") and along == axis:
                sizes = user.scalars.get("split_sizes") or user.scalars.get("split_size")
                widths = sizes if isinstance(sizes, (list, tuple)) else [int(str(sizes))] * (d_out // int(str(sizes)))
                cuts |= {sum(widths[:i]) for i in range(len(widths))}
            elif user.op == "glu" and along == axis:
                cuts.add(d_out // 2)
            elif user.op == "slice" and along == axis:
                mixed |= int(user.scalars.get("step") or 1) != 1
                ends = (user.scalars.get("start") or 0, user.scalars.get("end"))
                cuts |= {min(d_out, d_out if at is None else at + d_out if at < 0 else at) for at in ends}
            elif user.is_view or user.op in COPIES or (user.pointwise and _is_alone(value, user)):
                after = moved(value, user, frozenset({axis}))
                if len(after) == 1 and len(user.shape) <= 3 and user.shape[min(after)] == d_out:
                    queue.append((user, min(after)))
                elif len(after) > 1 and user.is_view and _taken_apart(user, min(after)):
                    n = user.shape[min(after)]
                    cuts |= {i * d_out // n for i in range(n)}
    bounds = sorted(cuts)
    parts = tuple(high - low for low, high in pairwise(bounds))
    return ((d_out,), True) if mixed else (parts, len(parts) == 1 and _meets_itself(product))


def _along(user: Node, value: Node) -> int | None:
    """Return the axis of `value` that a view or glu splits."""
    if not value.shape or not (user.is_view or user.op == "glu"):
        return None
    return int(user.scalars.get("dim", -1 if user.op == "glu" else 0)) % len(value.shape)


def _taken_apart(view: Node, axis: int) -> bool:
    """Return True if an axis stacks two or three matrices, of which one is selected."""
    queue = [(view, axis)] if view.shape[axis] in (2, 3) else []
    while queue:
        value, axis = queue.pop()
        for _, user in value.users:
            if user.op in ("unbind", "select") and _along(user, value) == axis:
                return True
            if user.is_view or user.op in COPIES:
                after = moved(value, user, frozenset({axis}))
                if len(after) == 1 and user.shape[min(after)] == value.shape[axis]:
                    queue.append((user, min(after)))
    return False


def _is_alone(value: Node, user: Node) -> bool:
    """Return True if `user` combines `value` with no other activations."""
    return all(other.kind in (CONST, PARAM) for other in user.others(value))


def _meets_itself(product: Node) -> bool:
    """Return True if two arguments of attention, or of a product of activations, come from this product."""
    walk = Walk(product)
    met: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for value, argument, user in walk:
        others = user.others(value)
        if (user.op in PRODUCTS and "conv" not in user.op) or user.op in ATTENTION:
            if all(other.kind != PARAM for other in others):
                arguments = met.setdefault((user.op, tuple(id(node) for _, node in user.inputs)), set())
                arguments.add(argument)
                if len(arguments) > 1:
                    return True
        # A factor of other activations, such as a gate, counts as one matrix.
        elif user.op != "mul" or all(other in walk.seen or other.kind != DATA for other in others):
            walk.follow(user)
    return False


def _with_siblings(sites: list[Site], trace: Classifier, roles: Roles, known: frozenset[str]) -> list[Site]:
    """Add experts without tokens to the site of their siblings, whose names differ only in the last number."""
    place = {_siblings(matrix.weight): (i, matrix) for i, site in enumerate(sites) for matrix in site.matrices}
    families = {family(name) for name in place}
    extra: dict[int, list[SiteMatrix]] = defaultdict(list)
    for row in roles.parameters:
        if row.role not in ("matrix", "router", "head") or row.name in trace.products:
            continue
        if (like := place.get(_siblings(row.name))) is not None:
            extra[like[0]].append(replace(like[1], weight=row.name))
        elif family(row.name) in families and row.name not in known:
            raise ConfigError(
                f"no token of the example reached {row.name}, so its scale vector is unknown; "
                "pass an example with more tokens."
            )
    return [replace(site, matrices=(*site.matrices, *extra[i])) for i, site in enumerate(sites)]


def _siblings(name: str) -> str:
    """Return a name with its last number replaced by '*'."""
    return re.sub(r"^(.*\.|)\d+(?![^.])", r"\1*", name)
