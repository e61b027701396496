"""Roles of parameters and their weight decay.

A policy is about scale vectors alone: 'iwd' decays those of role input. Weights (matrix, router,
head, embedding) always decay, multipliers as the output side, biases and the rest never.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar, get_args

from lightning_sv.scale.strategy import ScaleStrategy

#: in the order of priority for parameters with several uses
ModelRole = Literal[
    "embedding", "head", "router", "matrix", "output", "input", "multiplier", "bias", "other"
]
MODEL_ROLES: tuple[ModelRole, ...] = get_args(ModelRole)
#: roles that decay under every policy
WEIGHTS = frozenset({"matrix", "router", "head", "embedding"})
T = TypeVar("T")


@dataclass(frozen=True)
class ModelParameter:
    """Classification of one parameter.

    Attributes:
        name: name, as in `named_parameters`
        shape: sizes
        role: matrix, router (a matrix whose products select experts), head (a matrix whose products
            are the output), embedding (a lookup table), input (a scale vector read by linear maps
            only: the paper's Input-Norm), output (any other scale vector), multiplier (a factor of
            unnormalized values), bias, other
        redundant: for a scale vector, True if the matrices that read it could absorb it; otherwise
            None
        decays_to: for a scale vector, gamma at parameters of 0, to which decay pulls, such as 1 if
            gamma is 1 + w; None if unknown
        in_axis: for a matrix, the axis that its product sums over
        head_width: for a matrix, the width of the heads into which its product is viewed
        trained: True if it requires a gradient
    """

    name: str
    shape: tuple[int, ...]
    role: ModelRole
    redundant: bool | None = None
    decays_to: float | None = None
    in_axis: int | None = None
    head_width: int | None = None
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def decays(self, policy: str) -> bool:
        """Return True if it takes part in weight decay under 'wd', 'iwd', 'owd' or 'nowd'."""
        return self.role in decayed_roles(policy)


def agreed(values: Collection[T]) -> T | None:
    """Return the value on which all uses of a parameter agree; None if they differ, or without any.

    `values` has each different value once.
    """
    if len(values) != 1:
        return None
    return next(iter(values))


@cache
def decayed_roles(policy: str) -> frozenset[str]:
    """Return the roles that take part in weight decay under 'wd', 'iwd', 'owd' or 'nowd'."""
    roles = WEIGHTS | ScaleStrategy(decay=policy).decayed_roles
    if "output" in roles:
        roles |= {"multiplier"}
    return roles
