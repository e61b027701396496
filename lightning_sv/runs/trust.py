"""Modules that a recorded config would import if its run is resumed; each must be allowed by name."""

import os
import re
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError, expect
from lightning_sv.own_code import modules_named
from lightning_sv.runs.directory import LAST, read_config, run_of

#: packages that are always allowed
_OURS = ("lightning", "lightning_sv", "torch")
#: sections in which only `class_path` and names such as `package.module:Name` name code
_OUR_SECTIONS = ("model", "data")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
#: keys of the section `model` whose texts are no strategies
_PLAIN_TEXTS = (("init_from",), ("backbone", "name"))


def split_allow(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line without --trust_module, and the allowed modules.

    >>> split_allow(["fit", "--trust_module", "a", "b", "--allow_lr_jump"])
    (['fit', '--allow_lr_jump'], ['a', 'b'])
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trust_module", nargs="*", action="extend", default=[])
    options, rest = parser.parse_known_args(words)
    return rest, options.trust_module


def allow_words(modules: Collection[str]) -> list[str]:
    """Return the command-line words that allow modules."""
    return [word for module in sorted(modules) for word in ("--trust_module", module)]


def check_resumed(words: Sequence[str], allow: Collection[str]) -> None:
    """Check that the recorded config of a resumed run imports only allowed modules."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", dest="configs", nargs="?", const="", action="append", default=[])
    parser.add_argument("--ckpt_path", nargs="?", const="", default="")
    parser.add_argument("--run_dir", nargs="?", const="", default="")
    given, _ = parser.parse_known_args(words)
    checkpoint = given.ckpt_path
    if not checkpoint:
        return
    path = _expanded(given.run_dir) / LAST if checkpoint == "last" else _expanded(checkpoint)
    run = run_of(path) or path.parent.parent
    for file in map(_expanded, given.configs):
        if file.is_file() and file.parent.resolve() == run.resolve():
            check_trusted(file, modules_of(file), allow)


def _expanded(text: str) -> Path:
    """Return a path as the parser of a run expands it later."""
    return Path(os.path.expandvars(os.path.expanduser(text)))  # noqa: PTH111


def check_trusted(file: str | Path, modules: Collection[str], allow: Collection[str]) -> None:
    """Raise `ConfigError` if a file names a module that is not allowed."""
    if foreign := sorted(set(modules) - set(allow)):
        hint = f"if you trust it, add --trust_module {foreign[0]}, or in Python allow=[{foreign[0]!r}]."
        raise ConfigError(f"{file} would import {foreign[0]}; {hint}")


def modules_of(config: Path) -> set[str]:
    """Return the foreign modules that parsing a recorded config would import; refuse interpolations, which none has."""
    texts = list(_texts(read_config(config.parent, config.name), ()))
    for path, value in texts:
        expect(
            "${" not in value,
            f"{config}: {'.'.join(path)}",
            repr(value),
            "a value. The file was edited.",
        )
    return _foreign(texts)


def modules_of_words(words: Sequence[str]) -> set[str]:
    """Return the foreign modules that words such as `--config FILE --key value` name, also those in the files."""
    from lightning_sv.settings.yaml_file import (
        parse_overrides,
        read_yaml,
    )  # imported here, as in `read_config`

    try:
        files, keys = parse_overrides(words, "fit")
        content = [("", read_yaml(file, str(file))) for file in files] + list(keys.items())
    except ConfigError:  # words of a different program, or of a run that `fit` refuses
        return set()
    return _foreign(text for key, value in content for text in _texts(value, tuple(filter(None, key.split(".")))))


def modules_of_settings(settings: Mapping[str, Any]) -> set[str]:
    """Return the foreign modules that the settings of a run name."""
    return _foreign(_texts(settings, ()))


def _foreign(texts: Iterable[tuple[tuple[str, ...], str]]) -> set[str]:
    """Return the modules of others that the texts of a config, with their keys, name."""
    found: set[str] = set()
    for keys, value in texts:
        names_strategy = keys[0] == "model" and keys[1:] not in _PLAIN_TEXTS
        if names_strategy:
            found |= modules_named(value)
        if _is_class(keys, value):
            found.add(value.rpartition(".")[0])
    return {module for module in found if module.partition(".")[0] not in _OURS}


def _is_class(keys: tuple[str, ...], value: str) -> bool:
    """Return True if a text is the dotted name of something to import."""
    if _DOTTED.fullmatch(value) is None:
        return False
    if keys[-1] == "class_path":
        return True
    return keys[0] not in _OUR_SECTIONS and _importable(value)


def _importable(name: str) -> bool:
    """Return False if the first part of a dotted name is no module, as in the file name `perf.txt`."""
    try:
        return find_spec(name.partition(".")[0]) is not None
    except ValueError:  # a module without a specification
        return True


def _texts(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text of a config with its path of keys."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _texts(child, (*path, str(key)))
    elif isinstance(node, list):
        for child in node:
            yield from _texts(child, path)
