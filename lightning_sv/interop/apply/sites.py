"""Scale vectors of a traced model and the matrices that read them."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from lightning_sv.errors import ConfigError
from lightning_sv.roles import family
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.axes import block_of, users_along
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers
from lightning_sv.roles.dataflow import value_at
from lightning_sv.roles.graph import CONST, DATA, PARAM, Node, Walk, plain, users_in_order
from lightning_sv.roles.norms import stem
from lightning_sv.roles.ops import ATTENTION, CHOICES_OF_ROWS, NORMS, PRODUCTS, SOFTMAX, SUMS, TERMS
from lightning_sv.roles.types import ModelParameter, ModelRole

#: why a vector stays in its norm: other modules have the same parameter
TIED = "it is tied to a different parameter"
#: operations that put parts together
_JOINS = frozenset({"cat", "stack", "copy"})


class SiteMatrix(NamedTuple):
    """A matrix that reads the output of a scale vector."""

    weight: str  #: name of the parameter, (*batch_dims, d_out, d_in) or (*batch_dims, d_in, d_out)
    in_axis: int  #: axis that its product sums over
    parts: tuple[int, ...]  #: widths of the matrices concatenated in it, such as queries, keys and values
    mixed: bool  #: whether it has several matrices that cannot be separated into blocks of rows
    normalized: bool  #: whether its product is already normalized
    head_width: int | None  #: width of the heads into which its product is viewed
    role: ModelRole  #: matrix, router or head

    @property
    def word(self) -> str:
        """Last part of its name: 'q_proj' of 'model.layers.0.self_attn.q_proj.weight'."""
        return self.weight.removesuffix(".weight").rpartition(".")[2]


class Site(NamedTuple):
    """A scale vector of the model, or a norm without one."""

    vector: str  #: name of the parameter; '' for a norm without one
    origin: float | None  #: gamma is the parameter plus this, 0 or 1; None if it is neither
    role: str  #: 'input' or 'output'
    bias: str | None  #: name of the bias that its norm adds
    matrices: tuple[SiteMatrix, ...]  #: matrices that read it; empty for an output vector
    tied: tuple[str, ...]  #: names of matrices that read it and are tied to a different parameter, such as an embedding
    stays: str  #: reason why it cannot be folded into the matrices; '' if it can
    unfit: tuple[str, ...] = ()  #: names of matrices that read it and cannot have vectors; of an output vector, all

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of all matrices that read it."""
        return (*(matrix.weight for matrix in self.matrices), *self.tied, *self.unfit)


def find_sites(traced: TracedModel, *, bare: bool = False) -> list[Site]:
    """Return the model's scale vectors, in its own order; with `bare` also norms without one that only matrices read.

    Names with given roles that the pass does not reach have no site.
    """
    # by modules: one that is used at several places is not tied to another
    owners = Counter(id(parameter) for module in traced.model.modules() for parameter in module._parameters.values())
    tied = {name for name, parameter in traced.named.items() if owners[id(parameter)] > 1}
    tied |= {name for name in traced.products if "embedding" in traced.uses[name]}  # read by a function, not a layer
    normalized = _normalized_products(traced)
    sites = []
    for row in traced.roles.parameters:
        if row.role not in ("input", "output") or (row.name in traced.known and row.name not in traced.scaled):
            continue
        given = row.role == "output" and row.name in traced.known  # perhaps because its consumers are unknown
        readers = [] if given else _names_read(traced.consumers_of(row.name), traced)
        names = readers if row.role == "input" else []
        matrices = [matrix for name in names if (matrix := _matrix(name, traced, normalized)) is not None]
        stays = "" if row.redundant else "matrices cannot absorb it"
        if len(matrices) < len(names):
            stays = "it is read by a convolution, a function of a matrix or a different kind of product"
        for matrix in matrices:
            if matrix.weight in tied:
                stays = f"{matrix.weight} is tied and read elsewhere"
            elif len(row.shape) != 1:
                stays = f"its shape has {len(row.shape)} axes"
            elif traced.named[matrix.weight].shape[matrix.in_axis] != row.shape[-1]:
                stays = f"{matrix.weight} reads it with a different width"
        scaled = traced.scaled.get(row.name, ()) if matrices else ()
        addends = {_addends(node, row.shape, traced) for node, _ in scaled}
        biases = next(iter(addends), ())
        if len(addends) > 1:
            stays = "different biases are added after it"
        elif len(biases) > 1 or "" in biases:
            stays = "something other than one bias of its shape is added after it"
        if row.name in tied:
            stays = TIED
        bias = biases[0] if biases and not stays else None
        shared = tuple(sorted(matrix.weight for matrix in matrices if matrix.weight in tied))
        free = tuple(matrix for matrix in matrices if matrix.weight not in tied)
        unfit = tuple(name for name in readers if name not in {matrix.weight for matrix in matrices})
        sites.append(Site(row.name, _origin(row, traced), row.role, bias, free, shared, stays, unfit))
    if bare:
        sites += _bare_sites(traced, tied, normalized)
    return _with_siblings(sites, traced)


def _names_read(ends: Iterable[Consumer], traced: TracedModel) -> list[str]:
    """Return the names of the matrices of linear maps, in the model's order."""
    names = {name for end in ends if end.matrix is not None for name in traced.flow.sources[end.matrix]}
    return [name for name in traced.named if name in names]


def _bare_sites(traced: TracedModel, tied: set[str], normalized: dict[Node, bool]) -> list[Site]:
    """Return the norms without scale vector that only matrices read."""
    sites = []
    for norm in _bare_norms(traced):
        ones, width = Node("parameter", [], norm.shape[-1:], (1,)), norm.shape[-1]
        try:
            ends = list(consumers([(norm, ones)], "a norm without scale vector", through_gates=False))
        except UnknownConsumerError:
            continue
        if not ends or any(end.matrix is None or not end.along_channels for end in ends):
            continue
        products, names = {end.node for end in ends}, _names_read(ends, traced)
        candidates = {name: _matrix(name, traced, normalized) for name in names if name not in tied}
        fits = {
            name: matrix
            for name, matrix in candidates.items()
            if matrix is not None
            and traced.named[name].shape[matrix.in_axis] == width
            and {product for product, _, _ in traced.products[name]} <= products
        }
        shared = tuple(name for name in names if name in tied)
        unfit = tuple(name for name in candidates if name not in fits)
        sites.append(Site("", 1.0, "input", None, tuple(fits.values()), shared, "", unfit))
    return sites


def _bare_norms(traced: TracedModel) -> list[Node]:
    """Return the outputs of norms over the last axis that no scale vector multiplies."""
    scaled = {stem(other) for uses in traced.scaled.values() for node, vector in uses for other in node.others(vector)}
    norms = []
    for node in traced.flow.graph.nodes:
        if node.kind in (CONST, PARAM) or node not in traced.flow.normalized or node in scaled:
            continue
        inputs = [value for _, value in node.inputs]
        of_rows = [
            v for v in inputs if v in traced.flow.norms.statistics and (v.shape[-1:] == (1,) or v.stride[-1:] == (0,))
        ]
        one_axis = len(node.scalars.get("normalized_shape", ())) == 1
        if (one_axis if node.op in NORMS else of_rows) and node.shape[-1] > 1:
            norms.append(node)
    return norms


def _origin(row: ModelParameter, traced: TracedModel) -> float | None:
    """Return the constant added to a parameter for gamma; None if gamma is a different function, or a part, of it."""
    if row.name not in traced.scaled:  # a vector of an expert without tokens
        return row.decays_to
    if "bias" in traced.uses[row.name]:  # a table of gammas and biases
        return None
    numbers = [(value_at(factor, at), at) for _, factor in traced.scaled[row.name] for at in (0.0, 1.0, 3.0)]
    added = {None if value is None else value - at for value, at in numbers}
    return added.pop() if len(added) == 1 else None


def _addends(node: Node, vector: tuple[int, ...], traced: TracedModel) -> tuple[str, ...]:
    """Return the parameters of that shape that are added to `node`, a scaled value; '' stands for anything else."""
    added = [node.argument(NORMS[node.op][2])] if node.op in NORMS else []
    numbers, walk = [], Walk(node)  # numbers that are added; 1 stands for other values
    if node.op == "addcmul":
        added.append(node.argument("self"))
    for value, argument, user in walk:  # up to the matrices
        others = user.others(value)
        if user.op in PRODUCTS and any(other.kind == PARAM for other in others):
            continue
        if user.op in SUMS or (user.op == "addcmul" and argument != "self"):
            added += others if user.op in SUMS else [user.argument("self")]
            numbers.append(user.scalars.get("other", 0))
        elif user.op in TERMS and user.op not in ("mul", "div", "true_divide"):  # such as masked_fill, also by 0
            numbers += [user.scalars[key] for key in ("value", "other", "self") if key in user.scalars] or [1]
        elif user.op == "cat" and any(other.kind in (CONST, PARAM) for other in others):
            numbers.append(1)
        elif user.op == "constant_pad_nd":
            numbers.append(user.scalars.get("value", 0))
        walk.follow(user)
    fixed = {value for value in added if value is not None and value.kind in (CONST, PARAM)}
    names = {name for value in fixed if plain(value).op == "parameter" for name in traced.flow.sources[value]}
    fits = len(names) == len(fixed) and all(tuple(traced.named[name].shape) == vector for name in names)
    return tuple(sorted(names)) if fits and not any(numbers) else ("",)


def _normalized_products(traced: TracedModel) -> dict[Node, bool]:
    """Return input of a norm, which may be a sum -> whether norms read all of it; it then needs no second norm."""
    flow, normalized = traced.flow, dict[Node, bool]()
    read = [
        (source, node.inputs[0][1])
        for node, (source, _) in flow.norms.statistics.items()
        if not any(value in flow.norms.statistics for _, value in node.inputs)  # not a power of a different statistic
    ]
    read += [(stem(node.inputs[0][1]), node.inputs[0][1]) for node in flow.graph.nodes if node.op in NORMS]
    for source, value in read:
        all_read = math.prod(value.shape) == math.prod(source.shape)
        before_bias = [value for _, value in source.inputs] if source.op in SUMS else []
        for node in (source, *before_bias):
            normalized[node] = all_read or normalized.get(node, False)
    return normalized


def _matrix(name: str, traced: TracedModel, normalized: dict[Node, bool]) -> SiteMatrix | None:
    row, uses = traced.roles[name], traced.products[name]
    if any(plain(operand).op != "parameter" for _, operand, _ in uses):
        return None  # the product uses a function of it, which vectors do not commute with
    if row.in_axis is None or len(row.shape) not in (2, 3) or row.in_axis < len(row.shape) - 2:
        return None
    if any("conv" in p.op for p, _, _ in uses):
        return None
    d_out = row.shape[-2] if row.in_axis == len(row.shape) - 1 else row.shape[-1]
    layouts = {_parts(product, argument, d_out) for product, _, argument in uses}
    parts, mixed = layouts.pop() if len(layouts) == 1 else ((d_out,), True)
    norms = [normalized[node] for product, _, _ in uses for node in (stem(product), product) if node in normalized]
    if len(row.shape) == 2 and len(parts) == 1 and norms and not any(norms):
        mixed = True  # a norm of a part, such as one matrix of two
    mixed = mixed and row.role != "router"  # its scores meet its own choice of experts
    return SiteMatrix(name, row.in_axis, parts, mixed, any(norms), row.head_width, row.role)


def _parts(product: Node, argument: str, d_out: int) -> tuple[tuple[int, ...], bool]:
    """Return the widths into which a product's channels are split, and whether matrices are mixed otherwise."""
    axis = len(product.shape) - (1 if argument == PRODUCTS[product.op][1] else 2)
    if product.shape[axis] != d_out:  # a longer axis has stacked matrices, each with its own vectors
        return (d_out,), product.shape[axis] < d_out
    cuts = _cuts(product, axis)
    if cuts is None:
        return (d_out,), True
    parts = tuple(high - low for low, high in pairwise(sorted(cuts)))
    return parts, len(parts) == 1 and _meets_itself(product)


def _cuts(value: Node, axis: int, *, stacked: bool = False) -> set[int] | None:
    """Return the positions at which an axis of channels, or of heads, is split; None if the parts are not blocks.

    There is no cut between parts that are joined again, such as the halves of a head in a rotary embedding, nor if the
    pass reads one part only. With `stacked` the axis may be that of two or three matrices, of which one is selected.
    """
    n = value.shape[axis]
    cuts, parts, blocks = {0, n}, list[Node](), list[tuple[int, int, int]]()
    for use in users_along(value, axis):
        user, splits, after = use.user, use.splits, use.axes
        if splits and user.op == "glu":
            cuts.add(n // 2)
        elif splits and user.op in CHOICES_OF_ROWS:  # the graph has no positions
            if user.shape[axis] < n:
                return None
        elif splits and (user.op not in ("unbind", "select") or (stacked and n in (2, 3))):
            parts.append(user)
            blocks.append(block_of(user, n))
        elif len(after) > 1 and user.is_view:
            first, *inner = sorted(after)
            heads = _cuts(user, first, stacked=True)
            if heads is None or any(_takes_apart(user, each) for each in inner):
                return None
            cuts |= {at * n // user.shape[first] for at in heads}
    groups = _joined(parts, blocks)
    if any(step > 1 for _, _, step in blocks) and len(set(groups)) > 1:
        return None
    for (begin, _, _), group in zip(blocks, groups, strict=True):
        before = [(end, other) for (_, end, _), other in zip(blocks, groups, strict=True) if end <= begin]
        last = max((end for end, _ in before), default=0)
        if before and all(other != group for end, other in before if end == last):
            cuts.add(begin)
    return cuts


def _takes_apart(view: Node, axis: int) -> bool:
    """Return True if the pass splits an axis and does not join its parts again."""
    parts = [u.user for u in users_along(view, axis) if u.splits and u.user.op not in CHOICES_OF_ROWS]
    return len(set(_joined(parts, [block_of(part, view.shape[axis]) for part in parts]))) > 1


def _joined(parts: list[Node], blocks: list[tuple[int, int, int]]) -> list[frozenset[int]]:
    """Return the group of each part of a value: parts of the same block, in one sum, or concatenated with each other.

    Parts are followed through views, elementwise operations and attention, until they meet in a product.
    """
    groups = [frozenset(i for i, other in enumerate(blocks) if other == block) for block in blocks]
    found = {part: groups[i] for i, part in enumerate(parts)}
    for user in users_in_order(found):
        given = {found[value] for _, value in user.inputs if value in found}
        others = [value for _, value in user.inputs if value not in found]
        if len(given) > 1:
            if user.op not in SUMS | _JOINS:
                continue
            met = frozenset().union(*(groups[i] for i in frozenset().union(*given)))
            groups = [met if i in met else group for i, group in enumerate(groups)]
        elif not (
            user.moves
            or user.op in _JOINS | ATTENTION | SOFTMAX
            or (user.op in PRODUCTS and all(value.kind != PARAM for value in others))
            or (user.pointwise and all(value.kind != DATA for value in others))
        ):
            continue
        found[user] = frozenset().union(*given)
    return groups


def _meets_itself(product: Node) -> bool:
    """Return True if two arguments of attention, or of a product of activations, come from parts of this product."""
    walk = Walk(product)
    met: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    parts: set[Node] = set()  # one matrix may be read twice, as shared queries and keys, but not in parts
    for value, argument, user in walk:
        others = user.others(value)
        splits = (user.moves or user.op in CHOICES_OF_ROWS) and math.prod(user.shape) < math.prod(value.shape)
        if splits or value in parts:
            parts.add(user)
        last = (-1, len(user.shape) - 1)
        joins = user.op == "mul" or (user.op == "cat" and int(user.scalars.get("dim", 0)) in last)
        if (user.op in PRODUCTS and "conv" not in user.op) or user.op in ATTENTION:
            if all(other.kind != PARAM for other in others):
                arguments = met.setdefault((user.op, tuple(id(node) for _, node in user.inputs)), set())
                arguments.add(argument)
                if len(arguments) > 1 and parts.intersection(node for _, node in user.inputs):
                    return True
                walk.follow(user)  # unfused attention multiplies queries by keys, then the weights by values
        # A factor of other activations, such as a gate, counts as one matrix; so do channels joined with others.
        elif not joins or all(other in walk.seen or other.kind != DATA for other in others):
            walk.follow(user)
    return False


def _with_siblings(sites: list[Site], traced: TracedModel) -> list[Site]:
    """Add experts without tokens to the site of their siblings, whose names differ only in the last number.

    Raises:
        ConfigError: a sibling has a norm of its own that the pass does not reach, as in a layer that it skips
    """
    place = {_siblings(matrix.weight): (i, matrix) for i, site in enumerate(sites) for matrix in site.matrices}
    families = {family(name) for name in place}
    vectors = (row.name for row in traced.roles.parameters if row.role in ("input", "output"))
    own = {_siblings(name) for name in vectors if name not in traced.scaled}
    extra: dict[int, list[SiteMatrix]] = defaultdict(list)
    for row in traced.roles.parameters:
        if row.role not in ("matrix", "router", "head") or row.name in traced.products:
            continue
        like = place.get(_siblings(row.name))
        if like is not None and (not sites[like[0]].vector or _siblings(sites[like[0]].vector) not in own):
            extra[like[0]].append(like[1]._replace(weight=row.name))
        elif family(row.name) in families and row.name not in traced.known:
            hint = "pass an example that reaches it, such as one with more tokens."
            raise ConfigError(f"no token of the example reached {row.name}, so its scale vector is unknown; {hint}")
    return [site._replace(matrices=(*site.matrices, *extra[i])) for i, site in enumerate(sites)]


def _siblings(name: str) -> str:
    """Return a name with its last number replaced by '*'."""
    return re.sub(r"^(.*\.|)\d+(?![^.])", r"\1*", name)
