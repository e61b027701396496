"""All roles of a model, with tables and patterns of names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from lightning_sv.errors import ConfigError
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

        Numbers of layers and experts become wildcards. A name is shortened to its last two parts if
        that is unambiguous, otherwise to three, and so on; if roles differ between layers, full
        names are returned.

        Args:
            kind: 'regex' (for both re.search and re.match) or 'glob' (fnmatch)
            policy: 'wd', 'iwd', 'owd' or 'nowd'

        Raises:
            ConfigError: an unknown kind
        """
        if kind not in ("regex", "glob"):
            raise ConfigError(f"kind is {kind!r}; expected 'regex' or 'glob'.")
        decayed = [p.name for p in self.parameters if p.decays(policy)]
        patterns: list[str] = []
        for name in self.undecayed(policy):
            if not any(_matches(pattern, name, kind) for pattern in patterns):
                patterns.append(_shortest_pattern(name, kind, decayed))
        return patterns


def _matches(pattern: str, name: str, kind: Pattern) -> bool:
    if kind == "glob":
        return fnmatchcase(name, pattern)
    return re.search(pattern, name) is not None


def _shortest_pattern(name: str, kind: Pattern, others: Sequence[str]) -> str:
    """Return the shortest pattern of `name` that matches none of the other names."""
    candidates = _regexes(name) if kind == "regex" else _globs(name)
    for pattern in candidates:
        if not any(_matches(pattern, other, kind) for other in others):
            return pattern
    return candidates[-1]


def _regexes(name: str) -> list[str]:
    """Return regular expressions of `name`, the shortest first; the last is the full name."""
    words = [r"\d+" if word.isdigit() else re.escape(word) for word in name.split(".")]
    tails = _tails(words, r"\.")
    complete = r"\.".join(words)
    return [*(rf"^(.*\.)?{tail}$" for tail in tails), f"^{complete}$", f"^{re.escape(name)}$"]


def _globs(name: str) -> list[str]:
    """Return patterns of fnmatch, in the same order."""
    words = ["*" if word.isdigit() else word for word in name.split(".")]
    tails = _tails(words, ".")
    return [*(f"*.{tail}" for tail in tails), ".".join(words), name]


def _tails(words: list[str], dot: str) -> list[str]:
    """Return the last two words, the last three, and so on, without the first."""
    return [dot.join(words[-count:]) for count in range(2, len(words))]
