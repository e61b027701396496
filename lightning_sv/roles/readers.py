"""What reads a value: linear maps alone or not, the choice of experts, the output."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_sv.roles.flow import Flow, contraction, moved, plain
from lightning_sv.roles.ops import (
    ATTENTION,
    CHOICES,
    CHOICES_OF_ROWS,
    COPIES,
    LOSSES,
    MIXING,
    MULTIPLIED,
    NORMS,
    POOLS,
    PRODUCTS,
    QUANTIZES,
    ROWS,
    SCORES,
    SUMS,
)
from lightning_sv.roles.trace import CONST, PARAM, Node

_ADDING_ROWS = frozenset({"index_add", "scatter_add"})
_KNOWN = MIXING | frozenset(PRODUCTS) | SUMS | frozenset(ROWS)
_BATCHED = frozenset({"bmm", "baddbmm", "addbmm"})


class UnknownReaderError(ValueError):
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


def readings(start: Node, factor: Node, name: str, *, through_gates: bool) -> Iterator[Reading]:
    """Yield who reads `start`, the product of a normalized value and a scale vector.

    Followed are views, casts, choices of rows, biases, constants and factors that are one for all channels of a
    position; with `through_gates` all that is linear and leaves channels apart: factors from the data, attention's
    average of its values, sums over positions.

    Args:
        start: the scaled value
        factor: the scale vector
        name: of its scale vector, for the error
        through_gates: see above

    Raises:
        UnknownReaderError: an operation that is in no table of `ops`
    """
    first = (start, _channels(start, factor))
    queue, seen = [first], {start}
    while queue:
        value, channels = queue.pop()
        for argument, reader in value.readers:
            if reader.kind == CONST or (reader.output and reader.op in ATTENTION | frozenset(NORMS)):  # statistics
                continue
            if reader.op in PRODUCTS and argument in PRODUCTS[reader.op]:
                other = reader.argument(PRODUCTS[reader.op][PRODUCTS[reader.op][0] == argument])
                axis = contraction(reader, argument, value)
                if other is not None and other.kind == PARAM:
                    batch = {0} if len(value.shape) == 3 and reader.op in _BATCHED else set()
                    yield Reading(reader, other, axis in channels and channels <= {axis} | batch)
                    continue
            after = _after(value, argument, reader, channels, through_gates)
            if after is not None:
                if reader not in seen:
                    seen.add(reader)
                    queue.append((reader, after))
                continue
            if reader.op in QUANTIZES or not (reader.pointwise or reader.op in _KNOWN):
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


def _after(value: Node, argument: str, reader: Node, channels: frozenset[int], gates: bool) -> frozenset[int] | None:
    """Return where the channels lie after `reader`, None where the value ends there."""
    op, others = reader.op, reader.others(value)
    if reader.is_view or op in COPIES:
        return moved(value, reader, channels)
    if op in _ADDING_ROWS:
        other = reader.argument("self" if argument != "self" else ROWS[op][0])
        return channels if other is None or other.kind == CONST else None
    if argument in ROWS.get(op, ()) or (op in ROWS and argument == "self" and op not in CHOICES_OF_ROWS):
        shift = len(reader.shape) - len(value.shape)
        return frozenset(axis + shift for axis in channels) if op in ("stack", "index") else channels
    if op in SUMS and all(o.kind in (CONST, PARAM) for o in others):
        return moved(value, reader, channels)
    if argument in MULTIPLIED.get(op, ()) and not (op in ("div", "true_divide") and argument == "other"):
        after = moved(value, reader, channels)
        once = op in ("mul", "div", "true_divide") and len(others) == len(reader.inputs) - 1  # not x * x
        plain_factors = all(o.kind in (CONST, PARAM) or _one_a_position(o, reader, after) for o in others)
        return after if once and (gates or plain_factors) else None
    if not gates:
        return None
    if op in ATTENTION and argument == "value":
        return channels if reader.output == 0 else None
    if op in ("bmm", "baddbmm") and argument in PRODUCTS[op] and contraction(reader, argument, value) not in channels:
        return channels
    dims = reader.scalars.get("dim")
    if op in POOLS and dims is not None:
        summed = {d % len(value.shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
        if summed and not summed & channels:
            kept = bool(reader.scalars.get("keepdim")) or op == "cumsum"
            return channels if kept else frozenset(c - sum(d < c for d in summed) for c in channels)
    return None


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
