"""Roles of parameters, their weight decay, and patterns of their names."""

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Literal, get_args

from lightning_sv.errors import expect
from lightning_sv.own_code import find
from lightning_sv.scale.strategy import DECAYS, Decay

#: in the order of priority for parameters with several uses
ModelRole = Literal["embedding", "head", "router", "matrix", "output", "input", "multiplier", "bias", "other"]
MODEL_ROLES: tuple[ModelRole, ...] = get_args(ModelRole)
#: roles that decay under every policy
WEIGHTS = frozenset({"matrix", "router", "head", "embedding"})
Pattern = Literal["regex", "glob"]


@dataclass(frozen=True)
class ModelParameter:
    """Classification of one parameter.

    Attributes:
        name: name, as in `named_parameters`
        shape: sizes
        role: matrix, router (a matrix whose products select experts), head (a matrix whose products are the output),
            embedding (a lookup table), input (a scale vector read by linear maps only: the paper's Input-Norm), output
            (any other scale vector), multiplier (a factor of unnormalized values), bias, other
        redundant: for a scale vector, True if the following matrices could absorb it, also through gates and
            attention's average; otherwise None
        decays_to: for a scale vector, gamma at parameters of 0, to which decay pulls, such as 1 if gamma is 1 + w; None
            if unknown
        in_axis: for a matrix, the axis that its product sums over
        head_width: for a matrix, the width of the heads into which its product is divided; 0 if they are the last axis
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
        return self.role in _decayed_roles(policy)


@cache
def _decayed_roles(policy: str) -> frozenset[str]:
    row = find(DECAYS, policy, "policy")
    expect(isinstance(row, Decay), "policy", policy, f"a Decay, or one of {' '.join(DECAYS)}.")
    return WEIGHTS | row.roles | ({"multiplier"} if "output" in row.roles else set())


@dataclass(frozen=True)
class Roles:
    """All parameters of a model, in the order of `named_parameters`."""

    parameters: tuple[ModelParameter, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return self._by_name[name]

    def decayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that decay under `policy`."""
        return [p.name for p in self.parameters if p.trained and p.decays(policy)]

    def undecayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that do not decay under `policy`."""
        return [p.name for p in self.parameters if p.trained and not p.decays(policy)]

    def patterns(self, kind: Pattern = "regex", policy: str = "iwd") -> list[str]:
        """Return patterns that match exactly the names that do not decay.

        Numbers of layers and experts become wildcards. A name is shortened to its last two parts if that is
        unambiguous, otherwise to three, and so on; if roles differ between layers, full names are returned.

        Args:
            kind: 'regex' (for both re.search and re.match) or 'glob' (fnmatch)
            policy: 'wd', 'iwd', 'owd' or 'nowd'

        Raises:
            ConfigError: an unknown kind
        """
        expect(kind in ("regex", "glob"), "kind", repr(kind), "'regex' or 'glob'.")
        matches = re.search if kind == "regex" else lambda pattern, name: fnmatchcase(name, pattern)
        rest = [p.name for p in self.parameters if p.decays(policy)]
        patterns: list[str] = []
        for name in self.undecayed(policy):
            if not any(matches(pattern, name) for pattern in patterns):
                usable = (p for p in _candidates(name, kind) if not any(matches(p, other) for other in rest))
                patterns.append(next(usable))
        return patterns


def _candidates(name: str, kind: Pattern) -> list[str]:
    """Return patterns of `name`, the shortest first; the last is the full name."""
    regex = kind == "regex"
    number, dot = (r"\d+", r"\.") if regex else ("*", ".")
    words = [number if word.isdigit() else re.escape(word) if regex else word for word in name.split(".")]
    tails = [dot.join(words[-count:]) for count in range(2, len(words))]
    if regex:
        return [*(rf"^(.*\.)?{tail}$" for tail in tails), f"^{dot.join(words)}$", f"^{re.escape(name)}$"]
    return [*(f"*.{tail}" for tail in tails), dot.join(words), name]
