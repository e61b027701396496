r"""All roles of a model, with tables and patterns of names.

Many optimizers take patterns of names that do not decay. Names of layers differ in their numbers
alone, so a few patterns match hundreds of names:

    model.layers.0.input_layernorm.weight   |
    model.layers.1.input_layernorm.weight   |->   ^(.*\.)?input_layernorm\.weight$
    ...                                     |

A pattern grows by one word at a time until it matches no parameter that decays.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
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
        syntax = _SYNTAX.get(kind)
        if syntax is None:
            raise ConfigError(f"kind is {kind!r}; expected 'regex' or 'glob'.")
        decayed = [parameter.name for parameter in self.parameters if parameter.decays(policy)]
        remaining = self.undecayed(policy)
        patterns: list[str] = []
        while remaining:
            pattern = syntax.shortest(remaining[0], decayed)
            matched = syntax.matched(pattern, remaining)
            remaining = [name for name in remaining if name not in matched]
            patterns.append(pattern)
        return patterns


@dataclass(frozen=True)
class _Syntax:
    """How a kind of pattern writes names.

    Attributes:
        dot: pattern of a dot
        number: pattern of a number
        escape: function that returns the pattern of a word
        ending: pattern of names that end in {}
        complete: pattern of the name {}
        as_regex: function that returns the regular expression of a pattern
    """

    dot: str
    number: str
    escape: Callable[[str], str]
    ending: str
    complete: str
    as_regex: Callable[[str], str]

    def matched(self, pattern: str, names: Iterable[str]) -> set[str]:
        """Return the names that a pattern matches."""
        return set(filter(re.compile(self.as_regex(pattern)).search, names))

    def shortest(self, name: str, others: Sequence[str]) -> str:
        """Return the shortest pattern of a name that matches none of the others."""
        for pattern in self._general(name):
            if not self.matched(pattern, others):
                return pattern
        return self.complete.format(self.escape(name))

    def _general(self, name: str) -> Iterator[str]:
        """Yield patterns for all numbers, of the last two words, the last three, and so on."""
        words = list(map(self._word, name.split(".")))
        for count in range(2, len(words)):
            yield self.ending.format(self.dot.join(words[-count:]))
        yield self.complete.format(self.dot.join(words))

    def _word(self, word: str) -> str:
        return self.number if word.isdigit() else self.escape(word)


_SYNTAX: dict[str, _Syntax] = {
    "regex": _Syntax(r"\.", r"\d+", re.escape, r"^(.*\.)?{}$", "^{}$", as_regex=str),
    "glob": _Syntax(".", "*", str, "*.{}", "{}", as_regex=translate),
}
