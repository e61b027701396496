"""Short patterns that match exactly a set of parameter names."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from lightning_sv.errors import ConfigError

Pattern = Literal["regex", "glob"]


def patterns(wanted: Sequence[str], rest: Sequence[str], kind: Pattern = "regex") -> list[str]:
    r"""Return patterns that each match some of `wanted`, together all of it, and none of `rest`.

    Numbers of layers and experts are left open, and a name is cut to its last two words where that is unambiguous, to
    three where it is not, and so on; where roles differ from layer to layer the full names are given.

    Args:
        wanted: names to match
        rest: names not to match
        kind: 'regex' matches with re.search and re.match, 'glob' with fnmatch

    Raises:
        ConfigError: another kind

    >>> patterns(["layers.0.norm.weight", "layers.1.norm.weight"], ["layers.0.up.weight"])
    ['^(.*\\.)?norm\\.weight$']
    >>> patterns(["layers.0.norm.weight", "layers.1.norm.weight"], ["layers.0.up.weight"], "glob")
    ['*.norm.weight']
    """
    if kind not in ("regex", "glob"):
        raise ConfigError(f"patterns are 'regex' or 'glob', not {kind!r}.")
    found: list[str] = []
    for name in wanted:
        if not any(_matches(pattern, name, kind) for pattern in found):
            found.append(
                next(p for p in _candidates(name, kind) if not any(_matches(p, other, kind) for other in rest))
            )
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


def _matches(pattern: str, name: str, kind: Pattern) -> bool:
    if kind == "glob":
        return fnmatchcase(name, pattern)
    return re.search(pattern, name) is not None
