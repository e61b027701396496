"""What reads a value: linear maps alone or not, the choice of experts, the output."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_sv.errors import ConfigError
from lightning_sv.roles.flow import Flow, contraction, moved, plain
from lightning_sv.roles.measure import channels_of_result, is_measurable
from lightning_sv.roles.ops import (
    ADDING_ROWS,
    ATTENTION,
    CHOICES,
    CHOICES_OF_ROWS,
    COPIES,
    LOSSES,
    MIXING,
    NORMS,
    PRODUCTS,
    QUANTIZES,
    ROWS,
    SCORES,
    SUMS,
    TERMS,
)
from lightning_sv.roles.trace import CONST, DATA, PARAM, Node

_KNOWN = MIXING | frozenset(PRODUCTS) | frozenset(ROWS) | frozenset(TERMS)
_BATCHED = frozenset({"bmm", "baddbmm", "addbmm"})

#: nodes that are linear in a scale vector -> the axes along which its channels lie
Reached = dict[Node, frozenset[int]]


class UnknownReaderError(ConfigError):
    """A value is read by an operation of which it is not known whether it is linear."""


@dataclass(frozen=True)
class Reading:
    """One end of a value's way.

    Attributes:
        node: the operation that reads it
        matrix: the parameter's side of a linear map; None where the reader is none
        along_channels: the linear map sums over the value's channels, and so can take up their factors
    """

    node: Node
    matrix: Node | None = None
    along_channels: bool = False


def readings(scaled: Iterable[tuple[Node, Node]], name: str, *, through_gates: bool) -> Iterator[Reading]:
    """Yield the readers of all values that are linear in a scale vector, channel by channel.

    A result is such a value too if it is linear in the vector with coefficients that are constants, parameters, or one
    number per position: views, casts, chosen rows, sums over positions, biases, and sums of several such values. With
    `through_gates` the coefficients may be any data: gates, and attention's average of its values.

    Args:
        scaled: products of a normalized value and the scale vector, each with the factor that the vector is there
        name: parameter name of the scale vector, for the error
        through_gates: if True, follow products with data

    Raises:
        UnknownReaderError: an operation that is in no table of `ops` and cannot be measured
    """
    reached: Reached = {start: _channels(start, factor) for start, factor in scaled}
    yield from (Reading(start) for start in reached if not start.readers)  # returned as it is
    waiting = [(reader.order, reader) for start in reached for _, reader in start.readers]
    heapq.heapify(waiting)  # in the order of the pass: what a node is made of is decided before it
    last: Node | None = None
    while waiting:
        _, reader = heapq.heappop(waiting)
        if reader is last or reader in reached or reader.kind == CONST:
            continue
        last = reader
        if reader.output and reader.op in ATTENTION | frozenset(NORMS):  # statistics
            continue
        given = [(argument, value) for argument, value in reader.inputs if value in reached]
        for argument, value in list(given):
            matrix = _matrix(argument, reader, reached)
            if matrix is not None:
                axis = contraction(reader, argument, value)
                batch = {0} if len(value.shape) == 3 and reader.op in _BATCHED else set()
                along = axis in reached[value] and reached[value] <= {axis} | batch
                yield Reading(reader, matrix, along)
                given.remove((argument, value))
        if not given:
            continue
        after = _after(reader, given, reached, through_gates)
        if after is not None:
            reached[reader] = after
            for _, following in reader.readers:
                heapq.heappush(waiting, (following.order, following))
            continue
        if reader.op in QUANTIZES or not (reader.pointwise or reader.op in _KNOWN or is_measurable(reader)):
            raise UnknownReaderError(
                f"{name} scales a value that {reader.op!r} reads, of which it is not known whether it is a linear "
                "map; trace a plain model (no quantization, no fused kernel), or give the role in `known`."
            )
        yield Reading(reader)


def _channels(start: Node, factor: Node) -> frozenset[int]:
    """Return the axes of a scaled value along which its scale vector varies."""
    if start.op in NORMS and ("group" in start.op or "batch" in start.op):
        return frozenset({1})
    shift = len(start.shape) - len(factor.shape)
    rows = 1 if plain(factor).op in CHOICES_OF_ROWS else 0  # an expert's vector for each row
    return frozenset(i + shift for i, size in enumerate(factor.shape) if size > 1 and i >= rows)


def _matrix(argument: str, reader: Node, reached: Reached) -> Node | None:
    """Return the parameters with which a product is a linear map of its `argument`; None if it is not one."""
    operands = PRODUCTS.get(reader.op, ())
    others = [other for name in operands if name != argument and (other := reader.argument(name)) is not None]
    if argument not in operands or any(other in reached for other in others):
        return None
    return next((other for other in others if other.kind == PARAM), None)


def _after(reader: Node, given: list[tuple[str, Node]], reached: Reached, gates: bool) -> frozenset[int] | None:
    """Return where the channels lie in `reader`, None if it is not linear in the vector, channel by channel.

    Args:
        reader: the operation
        given: those of its inputs that are linear in the vector, by argument
        reached: axes of their channels
        gates: if True, coefficients may be any data
    """
    op = reader.op
    if reader.is_view or op in COPIES:
        value = given[0][1]
        return moved(value, reader, reached[value])
    if op in ATTENTION or op in PRODUCTS:
        (argument, value), *more = given
        if more or not _averages(reader, argument, value, reached[value], gates):
            return None
        return reached[value]
    if op in ROWS:
        taken = (*ROWS[op], *(() if op in CHOICES_OF_ROWS else ("self",)))
        if any(argument not in taken for argument, _ in given):
            return None
        if op in ADDING_ROWS and not all(
            value in reached or value.kind == CONST for argument, value in reader.inputs if argument in taken
        ):
            return None
        return _agreed(reader, given, reached)
    if op in TERMS:
        after = _agreed(reader, given, reached)
        linear = after is not None and all(_is_linear(reader, term, reached, after, gates) for term in TERMS[op])
        return after if linear else None
    return channels_of_result(reader, reached[given[0][1]]) if is_measurable(reader) else None


def _agreed(reader: Node, given: list[tuple[str, Node]], reached: Reached) -> frozenset[int] | None:
    """Return where the channels of all `given` lie in an elementwise result; None if at different places."""
    places = {moved(value, reader, reached[value]) for _, value in given}
    if reader.op == "stack":
        new = int(reader.scalars.get("dim", 0)) % len(reader.shape)
        places = {frozenset(axis + (axis >= new) for axis in reached[value]) for _, value in given}
    return places.pop() if len(places) == 1 else None


def _is_linear(reader: Node, term: str, reached: Reached, channels: frozenset[int], gates: bool) -> bool:
    """Whether a term of a sum has the vector once, above its fraction line, or not at all and no other data.

    Args:
        reader: the sum
        term: arguments that it multiplies, as in `TERMS`
        reached: values that are linear in the vector
        channels: axes of the result along which the vector's channels lie
        gates: if True, coefficients may be any data
    """
    above, _, below = term.partition("/")
    named = {name: value for name in above.split("*") if (value := reader.argument(name)) is not None}
    over = list(named.values())
    under = reader.argument(below)
    linear = [value for value in over if value in reached]
    if len(linear) > 1 or under in reached:
        return False
    factors = [value for value in (*over, under) if value is not None and value not in reached]
    if not linear:  # conditions choose, and add nothing
        return all(v.kind in (CONST, PARAM) or v is named.get("condition") for v in factors)
    return gates or all(v.kind in (CONST, PARAM) or _one_a_position(v, reader, channels) for v in factors)


def _averages(reader: Node, argument: str, value: Node, channels: frozenset[int], gates: bool) -> bool:
    """Whether a product averages a value over positions, with weights that are not made of it."""
    if reader.op in ATTENTION:
        return gates and argument == "value" and reader.output == 0
    if argument not in PRODUCTS[reader.op] or contraction(reader, argument, value) in channels:
        return False
    return reader.op in ("mm", "bmm") and (gates or all(other.kind != DATA for other in reader.others(value)))


def _one_a_position(factor: Node, result: Node, channels: frozenset[int]) -> bool:
    """Whether `factor`, broadcast to `result`, is the same for all channels."""
    shift = len(result.shape) - len(factor.shape)
    return bool(channels) and all(axis < shift or factor.shape[axis - shift] == 1 for axis in channels)


def is_router(product: Node) -> bool:
    """Whether a linear map's result reaches a choice (top-k, sort, argmax) as scores."""
    queue, seen = [product], {product}
    while queue:
        value = queue.pop()
        for argument, reader in value.readers:
            if reader.op in CHOICES and argument == "self":
                return True
            factors = reader.op not in ("mul", "div", "add", "sub") or all(
                other.kind in (CONST, PARAM) or other in seen for other in reader.others(value)
            )
            passes = reader.is_view or reader.op in COPIES or (reader.op in SCORES and factors)
            if passes and reader not in seen:
                seen.add(reader)
                queue.append(reader)
    return False


def is_head(product: Node, outputs: set[Node]) -> bool:
    """Whether a linear map's result reaches the output and nothing else, but for a scale, a cap or a loss."""
    queue, seen, out = [product], {product}, product in outputs
    while queue:
        value = queue.pop()
        for argument, reader in value.readers:
            if reader.kind == CONST or reader in seen:
                continue
            others = [other for other in reader.others(value) if other not in seen]
            factors = reader.op in ("where", "masked_fill") or all(other.kind in (CONST, PARAM) for other in others)
            passes = reader.is_view or reader.op in COPIES or argument in ROWS.get(reader.op, ())
            passes = passes or (reader.op in SCORES and factors) or reader.op in LOSSES | set(NORMS)
            if not passes:
                return False
            seen.add(reader)
            queue.append(reader)
            out = out or reader in outputs
    return out


def head_width(product: Node, flow: Flow) -> int | None:
    """Return the width of the heads into which a product's result is viewed, None if it is not."""
    queue, seen = [product], {product}
    while queue:
        value = queue.pop(0)
        for _, reader in value.readers:
            if reader in seen:
                continue
            if reader.is_view or reader.op in COPIES:
                width = value.shape[-1] if value.shape else 0
                if len(reader.shape) > 1 and reader.shape[-1] < width == reader.shape[-1] * reader.shape[-2]:
                    return reader.shape[-1]
            elif reader.op not in SUMS or any(o.kind not in (CONST, PARAM) for o in reader.others(value)):
                continue
            seen.add(reader)
            queue.append(reader)
    return None
