"""What is found of a model's parameters, and what follows for weight decay."""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_sv.roles.patterns import Pattern, patterns
from lightning_sv.scale import ScaleStrategy

ModelRole = Literal["matrix", "router", "head", "embedding", "bias", "input", "output", "multiplier", "other"]
#: of a parameter with several uses, the first of these
MODEL_ROLES: tuple[ModelRole, ...] = (
    "embedding", "head", "router", "matrix", "output", "input", "multiplier", "bias", "other",
)  # fmt: skip
#: roles that decay under every policy
WEIGHTS = frozenset({"matrix", "router", "head", "embedding"})


@dataclass(frozen=True)
class ModelParameter:
    """What the trace says of one parameter.

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
        roles = ScaleStrategy.parse(policy).decayed_roles
        if self.role in WEIGHTS:
            return True
        return self.role in roles or (self.role == "multiplier" and "output" in roles)


@dataclass(frozen=True)
class Roles:
    """Every parameter of a model, each once, in the order of `named_parameters`."""

    parameters: tuple[ModelParameter, ...]

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)

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
        wanted, rest = self.undecayed(policy), [p.name for p in self.parameters if p.decays(policy)]
        if decayed:
            wanted, rest = self.decayed(policy), [p.name for p in self.parameters if not p.decays(policy)]
        return patterns(wanted, rest, kind)
