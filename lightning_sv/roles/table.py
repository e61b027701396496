"""Plain text tables of parameters, with one row for all layers.

model.layers.*                        the module, once
  input_layernorm.weight  24  1024    its parameters, and in how many layers they are
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from lightning_sv.roles.types import ModelParameter

_LEGEND = """n: number of tensors. folds: whether the matrices that read it can absorb it.
to: the value that decay approaches. {policy}: whether it decays under {policy}.
fixed: it does not train."""
_FOLDS = {None: "", True: "yes", False: "no"}


def family(name: str) -> str:
    """Return a name with its numbers replaced by '*', equal for all layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with columns of equal width."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    return [_line(row, widths) for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


def parameter_table(parameters: Iterable[ModelParameter], policy: str) -> str:
    """Return a table with one row per kind of parameter, below its module."""
    kinds: dict[tuple[object, ...], list[ModelParameter]] = defaultdict(list)
    for parameter in parameters:
        kind = (
            family(parameter.name),
            parameter.shape,
            parameter.role,
            parameter.redundant,
            parameter.decays_to,
            parameter.trained,
        )
        kinds[kind].append(parameter)
    modules: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for alike in kinds.values():
        modules[_module(alike[0].name)].append(_row(alike, policy))
    heading = ("parameter", "n", "shape", "role", "folds", "to", policy)
    first, *lines = aligned([heading, *chain.from_iterable(modules.values())])
    body = _below_modules(modules, lines)
    return "\n".join([first, *body, "", _LEGEND.format(policy=policy)])


def _module(name: str) -> str:
    """Return the module that heads a group of rows, which have the last two parts of a name."""
    return ".".join(family(name).split(".")[:-2])


def _row(alike: Sequence[ModelParameter], policy: str) -> tuple[str, ...]:
    first = alike[0]
    label = ".".join(family(first.name).split(".")[-2:])
    if _module(first.name):
        label = f"  {label}"
    shape = "x".join(map(str, first.shape))
    to = "" if first.decays_to is None else f"{first.decays_to:g}"
    decay = _decay(first, policy)
    return (label, f"{len(alike)}", shape, first.role, _FOLDS[first.redundant], to, decay)


def _decay(parameter: ModelParameter, policy: str) -> str:
    if not parameter.trained:
        return "fixed"
    return "yes" if parameter.decays(policy) else "no"


def _below_modules(modules: dict[str, list[tuple[str, ...]]], lines: list[str]) -> list[str]:
    """Insert the name of each module before its lines."""
    body: list[str] = []
    start = 0
    for module, rows in modules.items():
        if module:
            body.append(module)
        body += lines[start : start + len(rows)]
        start += len(rows)
    return body
