"""Roles of parameters, what follows from them for weight decay, and patterns of their names."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Literal

from lightning_sv.errors import ConfigError
from lightning_sv.scale import ScaleStrategy

ModelRole = Literal["matrix", "router", "head", "embedding", "bias", "input", "output", "multiplier", "other"]
#: of a parameter with several uses, the first of these
MODEL_ROLES: tuple[ModelRole, ...] = (
    "embedding", "head", "router", "matrix", "output", "input", "multiplier", "bias", "other",
)  # fmt: skip
#: roles that decay under every policy
WEIGHTS = frozenset({"matrix", "router", "head", "embedding"})
Pattern = Literal["regex", "glob"]


@dataclass(frozen=True)
class ModelParameter:
    """What the trace shows of one parameter.

    Attributes:
        name: as in `named_parameters`
        shape: its sizes
        role: matrix, router (a matrix whose products choose experts), head (... are the output), embedding (a table
            that is looked up), input (a scale vector that only linear maps read: the paper's Input-Norm), output (any
            other scale vector), multiplier (a factor of something that is not normalized), bias, other
        redundant: of a scale vector, whether the matrices that follow could take it up, through gates and
            attention's average too; None of the rest
        decays_to: the factor to which decay pulls a scale vector: 0, or 1 where gamma is 1 + w; None of the rest
        in_axis: of a matrix, the axis that its product sums over
        head_width: of a matrix, the width of the heads into which its product is viewed
        trained: whether it has a gradient
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
        """Whether it takes part in weight decay under 'wd', 'iwd', 'owd' or 'nowd'."""
        return self.role in _decayed_roles(policy)


@cache
def _decayed_roles(policy: str) -> frozenset[str]:
    vectors = ScaleStrategy.parse(policy).decayed_roles
    return WEIGHTS | vectors | ({"multiplier"} if "output" in vectors else set())


@dataclass(frozen=True)
class Roles:
    """Every parameter of a model, each once, in the order of `named_parameters`."""

    parameters: tuple[ModelParameter, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return self._by_name[name]

    def decayed(self, policy: str = "iwd") -> list[str]:
        """Names of the trained parameters that decay under `policy`."""
        return [p.name for p in self.parameters if p.trained and p.decays(policy)]

    def undecayed(self, policy: str = "iwd") -> list[str]:
        """Names of the trained parameters that do not."""
        return [p.name for p in self.parameters if p.trained and not p.decays(policy)]

    def patterns(self, kind: Pattern = "regex", policy: str = "iwd", *, decayed: bool = False) -> list[str]:
        """Return patterns that match exactly the names that do not decay under `policy` (that do, with `decayed`).

        Args:
            kind: 'regex' (for re.search and re.match alike) or 'glob' (fnmatch)
            policy: 'wd', 'iwd', 'owd' or 'nowd'
            decayed: which side
        """
        wanted = self.decayed(policy) if decayed else self.undecayed(policy)
        return name_patterns(wanted, [p.name for p in self.parameters if p.decays(policy) != decayed], kind)


def name_patterns(wanted: Sequence[str], rest: Sequence[str], kind: Pattern = "regex") -> list[str]:
    r"""Return patterns that each match some of `wanted`, together all of it, and none of `rest`.

    Numbers of layers and experts are left open, and a name is cut to its last two words where that is unambiguous, to
    three where it is not, and so on; where roles differ from layer to layer the full names are given.

    Args:
        wanted: names to match
        rest: names not to match
        kind: 'regex' matches with re.search and re.match, 'glob' with fnmatch

    Raises:
        ConfigError: another kind

    >>> name_patterns(["layers.0.norm.weight", "layers.1.norm.weight"], ["layers.0.up.weight"])
    ['^(.*\\.)?norm\\.weight$']
    >>> name_patterns(["layers.0.norm.weight", "layers.1.norm.weight"], ["layers.0.up.weight"], "glob")
    ['*.norm.weight']
    """
    if kind not in ("regex", "glob"):
        raise ConfigError(f"patterns are 'regex' or 'glob', not {kind!r}.")
    matches = re.search if kind == "regex" else lambda pattern, name: fnmatchcase(name, pattern)
    found: list[str] = []
    for name in wanted:
        if not any(matches(pattern, name) for pattern in found):
            found.append(next(p for p in _candidates(name, kind) if not any(matches(p, other) for other in rest)))
    return found


def _candidates(name: str, kind: Pattern) -> list[str]:
    """Patterns of `name`, the shortest first; the last is the name itself."""
    words = name.split(".")
    out = []
    for count in range(min(2, len(words)), len(words) + 1):
        tail, whole = words[-count:], count == len(words)
        if kind == "regex":
            text = r"\.".join(r"\d+" if word.isdigit() else re.escape(word) for word in tail)
            out.append(f"^{text}$" if whole else rf"^(.*\.)?{text}$")
        else:
            text = ".".join("*" if word.isdigit() else word for word in tail)
            out.append(text if whole else f"*.{text}")
    return [*out, rf"^{re.escape(name)}$" if kind == "regex" else name]
