"""Parser of commands without config files, based on argparse, so that they start fast."""

import math
from argparse import (
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_sv.errors import ConfigError
from lightning_sv.settings.paths import expand_path
from lightning_sv.settings.words import underscored


class _Defaults(ArgumentDefaultsHelpFormatter):
    """Append the default of an option to its help, unless it is empty or the help states it."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.default in (None, False, "", []) or "by default" in str(action.help):
            return action.help
        return super()._get_help_string(action)


class PlainParser(ArgumentParser):
    """An argparse parser that raises ConfigError; names may have `-` for `_`, and no abbreviations.

    Paths are expanded, numbers must be finite, and bytes that are not UTF-8 are replaced.
    """

    def __init__(self, command: str, description: str, json: str | None = None) -> None:
        program = f"lightning-sv {command}"
        super().__init__(
            program, description=description, allow_abbrev=False, formatter_class=_Defaults
        )
        self.register("type", Path, _path)
        self.register("type", float, number(float))
        self.register("type", None, _text)
        if json is not None:
            self.add_argument("--json", action="store_true", help=json)

    def add_places(self, out: str) -> None:
        """Add `--out`, with this help, and `--jobs` to a command that trains several runs."""
        self.add_argument("--out", type=Path, help=out)
        self.add_argument(
            "--jobs",
            type=number(int, 1, 1000),
            help="Number of parallel runs; by default one if there is a GPU, otherwise one per "
            "core, at most four.",
        )

    def add_trust(self, reader: str) -> None:
        """Add `--trust_module` to a command that reads a run or a checkpoint."""
        text = f"Modules that {reader} may import."
        self.add_argument("--trust_module", nargs="+", default=[], metavar="MODULE", help=text)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse; also return the unknown arguments, with `_` in the names of their options."""
        words = None if args is None else underscored(args)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message}. See {self.prog} --help.")


def number(
    kind: type[float], least: float = -math.inf, most: float = math.inf
) -> Callable[[str], float]:
    """Return a type for `add_argument`: a finite number within bounds."""
    expected = "a whole number" if kind is int else "a finite number"
    if least > -math.inf:
        expected += f" from {least:,}"
    if most < math.inf:
        expected += f" up to {most:,}"

    def read(text: str) -> float:
        refusal = ArgumentTypeError(f"the value is {text:.40}; expected {expected}")
        try:
            value = kind(text)
        except ValueError:
            raise refusal from None
        is_finite = abs(value) < math.inf  # math.isfinite takes no integer above 1.8e308
        if is_finite and least <= value <= most:
            return value
        raise refusal

    return read


def _path(text: str) -> Path:
    try:
        return Path(expand_path(text, "the path"))
    except ConfigError as error:
        raise ArgumentTypeError(str(error).rstrip(".")) from error


def _text(word: str) -> str:
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
