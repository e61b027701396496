r"""All roles of a model, with tables and patterns of names.

Many optimizers take patterns of names that do not decay. Names of layers differ in their numbers
alone, so a few patterns match hundreds of names:

    model.layers.0.input_layernorm.weight   |
    model.layers.1.input_layernorm.weight   |->   ^(.*\.)?input_layernorm\.weight$
    ...                                     |

A pattern grows by one word at a time until it matches no parameter that decays.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_sv.roles.table import parameter_table
from lightning_sv.roles.types import ModelParameter


@dataclass(frozen=True)
class Roles:
    """All parameters of a model, in the order of `named_parameters`; as text a table."""

    parameters: tuple[ModelParameter, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @property
    def _trained(self) -> list[ModelParameter]:
        return [parameter for parameter in self.parameters if parameter.trained]

    def __str__(self) -> str:
        """Return a table with one row per kind of parameter, and its decay under 'iwd'."""
        return parameter_table(self.parameters, "iwd")

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return self._by_name[name]

    def decayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that decay under `policy`."""
        return [parameter.name for parameter in self._trained if parameter.decays(policy)]

    def undecayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that do not decay under `policy`."""
        return [parameter.name for parameter in self._trained if not parameter.decays(policy)]

    def patterns(self, policy: str = "iwd") -> list[str]:
        """Return regular expressions that match exactly the names that do not decay.

        They are for both re.search and re.match. Numbers of layers and experts become wildcards. A
        name is shortened to its last two parts if that is unambiguous, otherwise to three, and so
        on; if roles differ between layers, full names are returned.
        """
        decayed = [parameter.name for parameter in self.parameters if parameter.decays(policy)]
        remaining = self.undecayed(policy)
        patterns: list[str] = []
        while remaining:
            pattern = _shortest(remaining[0], decayed)
            matched = _matched(pattern, remaining)
            remaining = [name for name in remaining if name not in matched]
            patterns.append(pattern)
        return patterns


def _shortest(name: str, others: Sequence[str]) -> str:
    """Return the shortest pattern of a name that matches none of the others."""
    for pattern in _general_patterns(name):
        if not _matched(pattern, others):
            return pattern
    return f"^{re.escape(name)}$"


def _matched(pattern: str, names: Iterable[str]) -> set[str]:
    """Return the names that a pattern matches."""
    return set(filter(re.compile(pattern).search, names))


def _general_patterns(name: str) -> Iterator[str]:
    """Yield patterns for all numbers, of the last two words, the last three, and so on."""
    words = [r"\d+" if word.isdigit() else re.escape(word) for word in name.split(".")]
    for count in range(2, len(words)):
        ending = r"\.".join(words[-count:])
        yield rf"^(.*\.)?{ending}$"
    complete = r"\.".join(words)
    yield f"^{complete}$"
