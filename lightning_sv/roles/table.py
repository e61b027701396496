"""Plain text table of parameters, with one row for all layers."""

import re
from collections import Counter
from collections.abc import Iterable

from lightning_sv.roles.types import ModelParameter

_COLUMNS = ("parameter", "shape", "role", "folds", "decays to", "decays under iwd")
_FOLDS = {None: "", True: "yes", False: "no"}


def family(name: str) -> str:
    """Return a name with its numbers replaced by '*', equal for all layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def parameter_table(parameters: Iterable[ModelParameter]) -> str:
    """Return a table with one row per kind of parameter."""
    import pandas as pd  # takes half a second

    tensors = Counter(map(_row, parameters))
    table = pd.DataFrame(list(tensors), columns=_COLUMNS)
    table.insert(1, "tensors", list(tensors.values()))
    return table.to_string(index=False)


def _row(parameter: ModelParameter) -> tuple[str, ...]:
    """Return the cells of a parameter, equal for those of the same kind."""
    shape = "x".join(map(str, parameter.shape))
    folds = _FOLDS[parameter.redundant]
    decays_to = ""
    if parameter.decays_to is not None:
        decays_to = f"{parameter.decays_to:g}"
    return (family(parameter.name), shape, parameter.role, folds, decays_to, _decay(parameter))


def _decay(parameter: ModelParameter) -> str:
    if not parameter.trained:
        return "frozen"
    return "yes" if parameter.decays("iwd") else "no"
