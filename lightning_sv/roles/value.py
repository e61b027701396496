"""What a scale vector multiplies by, as a function of its parameter: gamma, 1 + gamma, exp(w)."""

import math
from collections.abc import Callable

from lightning_sv.roles.ops import COPIES
from lightning_sv.roles.trace import CONST, PARAM, Node

#: what an operation makes of the number of a parameter, and of that and another
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, number: x + number,
    "sub": lambda x, number: x - number,
    "rsub": lambda x, number: number - x,
    "mul": lambda x, number: x * number,
    "div": lambda x, number: x / number,
}


def value_at(factor: Node, at: float) -> float | None:
    """Return what a scale vector multiplies by where its parameter is `at`; None if that is not one number."""
    if factor.op == "parameter":
        return at
    learned = [value for _, value in factor.inputs if value.kind == PARAM]
    base = value_at(learned[0], at) if len(learned) == 1 else None
    if base is None or factor.is_view or factor.op in COPIES:
        return -base if base is not None and factor.op == "neg" else base
    if factor.op in _FUNCTIONS:
        return _FUNCTIONS[factor.op](base)
    constants = [value for _, value in factor.inputs if value.kind == CONST]
    ones = bool(constants) and constants[0].op in ("ones", "ones_like", "new_ones")
    other = 1.0 if ones else factor.scalars.get("other")
    if factor.op not in _ARITHMETIC or not isinstance(other, (int, float)):
        return None
    return _ARITHMETIC[factor.op](base, float(factor.scalars.get("alpha") or 1) * other)
