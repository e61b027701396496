"""An argument parser whose errors are one sentence with the nearest right name."""

import itertools
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

from jsonargparse import ArgumentParser, Namespace

from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.yaml_file import check_yaml


class Parser(ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit; `-` in an option's name counts as `_`.

    Misspelled keys, from YAML or the command line, are answered with the nearest right one.
    """

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse, after checking that every config file is readable YAML."""
        words = sys.argv[1:] if args is None else args
        if isinstance(words, list):
            args = words = underscored(words)
            for flag, value in itertools.pairwise([*words, ""]):
                name, _, inline = flag.partition("=")
                if name in ("--config", "-c"):
                    check_yaml(inline or value, f"--config {inline or value}")
        try:
            config = super().parse_args(args, *rest, **kwargs)
        except (OverflowError, TypeError, RecursionError, AttributeError, KeyError) as error:
            # jsonargparse meets 10**400 for a float, or a list for a section
            self.error(f"a value cannot be read ({error!r})", None)
        _check_values(self, config)
        return config

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ValueError with the cause in one line."""
        text = re.sub(r"\s+", " ", str(ex or message)).strip().removesuffix(".")
        raise ValueError(f"{text}.{self._hint(text)}") from ex

    def _hint(self, text: str) -> str:
        unknown = re.search(r"(?:[Kk]ey|[Oo]ption) [\"'](?P<key>[\w.]+)[\"']|--(?P<flag>[\w.]+)", text)
        if not unknown:
            return ""
        key = unknown["key"] or unknown["flag"]
        known = sorted(_keys(self))
        if key in known:
            return ""
        near = get_close_matches(key, known, n=1, cutoff=0.7)
        if not near:
            leaves = {name.rpartition(".")[2]: name for name in known}
            near = [leaves[m] for m in get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.7)]
        return f" Did you mean {near[0]!r}?" if near else ""


def _check_values(parser: ArgumentParser, config: Any) -> None:
    """Raise ValueError where jsonargparse lets pass a single value for a section of keys, or null for a value."""
    for group in parser._action_groups:
        section = getattr(group, "dest", None) if getattr(group, "group_class", None) else None
        value = config.get(section) if section else None
        if value is not None and not isinstance(value, dict | Namespace):
            raise ValueError(f"{section} is {value!r}; it must hold keys and values.")
    for action in parser._actions:
        if isinstance(action.choices, dict) and (name := config.get(action.dest)) in action.choices:
            _check_values(action.choices[name], config[name])
        hint = getattr(action, "_typehint", None)
        nullable = hint in (None, Any) or type(None) in get_args(hint) or action.default is None
        if not nullable and action.dest in config and config[action.dest] is None:
            raise ValueError(f"{action.dest} is null; it needs a value, or leave it out for {action.default!r}.")


def _keys(parser: ArgumentParser) -> set[str]:
    """Every key of a parser and its subcommands."""
    keys = set()
    for action in parser._actions:
        if isinstance(action.choices, dict):  # subcommand -> its parser
            for child in action.choices.values():
                keys |= _keys(child)
        elif action.dest not in ("help", "config"):
            keys.add(action.dest)
    return keys
