"""Words of a command line as options with their values."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """An option of a command line with its value, or a word that belongs to no option.

    Attributes:
        name: name without dashes; empty for a word that belongs to no option
        value: value; None for an option without one
        words: the words that it was read from
    """

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The value; empty for an option without one."""
        return self.value or ""


def options_of(words: Iterable[str]) -> list[Option]:
    """Return the options of a command line: `--name=value`, `--name value` or `--name`.

    >>> [(option.name, option.value) for option in options_of(["--a=1", "--b", "-2", "c", "--d"])]
    [('a', '1'), ('b', '-2'), ('', 'c'), ('d', None)]
    """
    options: list[Option] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            options.append(Option("", word, (word,)))
        elif equals:
            options.append(Option(name, value, (word,)))
        elif rest and not rest[0].startswith("--"):
            following = rest.popleft()
            options.append(Option(name, following, (word, following)))
        else:
            options.append(Option(name, None, (word,)))
    return options


def values_of(words: Iterable[str], name: str) -> list[str]:
    """Return the values of all options of a name.

    >>> values_of(["--config", "a", "--seed", "1", "--config=b"], "config")
    ['a', 'b']
    """
    return [option.text for option in options_of(words) if option.name == name]


def underscored(words: Iterable[str]) -> list[str]:
    """Replace `-` by `_` in the names of options, but not in values or after a separate `--`.

    `-c`, LightningCLI's short name, becomes `--config`.

    >>> underscored(["--dry-run", "--max-steps=-1", "--a_args=--model.seed 1-2", "a-b", "-c"])
    ['--dry_run', '--max_steps=-1', '--a_args=--model.seed 1-2', 'a-b', '--config']
    >>> underscored(["--", "--c-d"])
    ['--', '--c-d']
    """
    given = list(words)
    end = len(given)
    if "--" in given:
        end = given.index("--")
    return [*map(_underscored, given[:end]), *given[end:]]


def _underscored(word: str) -> str:
    if word == "-c":
        return "--config"
    if not word.startswith("--"):
        return word
    name, equals, value = word.removeprefix("--").partition("=")
    if " " in name:  # a value, as for argparse
        return word
    return f"--{name.replace('-', '_')}{equals}{value}"
