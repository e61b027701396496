"""All roles of a model, with tables and patterns of names."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from lightning_sv.errors import expect
from lightning_sv.roles.table import parameter_table
from lightning_sv.roles.types import ModelParameter, Pattern


@dataclass(frozen=True)
class Roles:
    """All parameters of a model, in the order of `named_parameters`; as text a table."""

    parameters: tuple[ModelParameter, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __str__(self) -> str:
        """Return a table with one row per kind of parameter, and its decay under 'iwd'."""
        return parameter_table(self.parameters, "iwd")

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
