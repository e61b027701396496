"""Parser of commands without config files, based on argparse, so that they start fast."""

import math
import re
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, HelpFormatter, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_sv.errors import ConfigError
from lightning_sv.settings.paths import expand_path


class _Defaults(HelpFormatter):
    """Append the default of an option to its help, unless the help states it."""

    def _get_help_string(self, action: Action) -> str | None:
        valued = action.default not in (None, False, "", SUPPRESS) and action.default != []
        stated = action.help is None or "by default" in action.help or not action.option_strings
        return action.help if stated or not valued else f"{action.help} (default: %(default)s)"


class PlainParser(ArgumentParser):
    """An argparse parser with errors of one sentence and without abbreviations; `-` in a name counts as `_`.

    Paths are expanded, numbers must be finite, and bytes that are not UTF-8 are replaced. Without a help for `--json`
    the command has no such option.
    """

    def __init__(self, command: str, description: str, json: str) -> None:
        program = f"lightning-sv {command}"
        super().__init__(program, description=description, allow_abbrev=False, formatter_class=_Defaults)
        self.register("type", Path, _path)
        self.register("type", float, number(float))
        self.register("type", None, _text)
        self.add_argument("--json", action="store_true", help=json)

    def add_places(self, out: str) -> None:
        """Add `--out`, with this help, and `--jobs` to a command that trains several runs."""
        self.add_argument("--out", type=Path, help=out)
        jobs = "Number of parallel runs; by default one if there is a GPU, otherwise one per core, at most four."
        self.add_argument("--jobs", type=number(int, 1, 1000), help=jobs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse; also return the unknown arguments, with `_` in the names of their options."""
        return super().parse_known_args(None if args is None else underscored(args), namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        message = re.sub(r"^argument (\S+): is ", r"\1 is ", message)
        message = re.sub(
            r"^argument (\S+): invalid choice: (.*) \(choose from (.*)\)", r"\1 is \2; expected one of: \3", message
        )
        message = re.sub(r"^argument (\S+): expected (.*) argument.*", r"\1 has no value; expected \2", message)
        message = re.sub(r"^the following arguments are required: (.*)", r"\1 is not set; expected a value", message)
        raise ConfigError(f"{self.prog.split()[-1]}: {message}. See {self.prog} --help.")


def number(kind: type[float], least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Return a type for `add_argument`: a finite number within bounds."""
    words = ["a whole number" if kind is int else "a finite number"]
    words += [f"from {least:,}"] * (least > -math.inf) + [f"up to {most:,}"] * (most < math.inf)
    expected = " ".join(words)

    def read(text: str) -> float:
        try:
            value = kind(text)
            if math.isfinite(value) and least <= value <= most:
                return value
        except (ValueError, OverflowError):
            pass
        raise ArgumentTypeError(f"is {text:.40}; expected {expected}")

    return read


def _path(text: str) -> Path:
    try:
        return Path(expand_path(text, ""))
    except ConfigError as error:
        raise ArgumentTypeError(str(error).strip(" .")) from error


def _text(word: Any) -> Any:
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(word, str) else word


def underscored(words: Iterable[str]) -> list[str]:
    """Replace `-` by `_` in the names of options, but not in values or after a separate `--`.

    >>> underscored(["--dry-run", "--trainer.max-steps=-1", "--a_args=--model.seed 1-2", "a-b", "--", "--c-d"])
    ['--dry_run', '--trainer.max_steps=-1', '--a_args=--model.seed 1-2', 'a-b', '--', '--c-d']
    """
    result: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        # argparse treats a word with a space as a value
        if name.startswith("--") and " " not in name and "--" not in result:
            word = f"--{name[2:].replace('-', '_')}{equals}{value}"
        result.append(word)
    return result
