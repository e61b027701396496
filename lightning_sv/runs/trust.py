"""Modules that a recorded config would import if its run is resumed.

Each must be allowed by name.
"""

import os
import re
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.own_code import modules_named
from lightning_sv.runs.directory import LAST, read_config, run_of
from lightning_sv.settings.words import last_value_of, values_of

#: a text of a config, after the path of its keys
Text = tuple[tuple[str, ...], str]
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
    words: list[str] = []
    for module in sorted(modules):
        words += ["--trust_module", module]
    return words


def check_resumed(words: Sequence[str], allow: Collection[str]) -> None:
    """Check that the recorded config of a resumed run imports only allowed modules."""
    run = _resumed_run(words)
    if run is None:
        return
    for config in values_of(words, "config"):
        file = _expanded(config)
        is_recorded = file.is_file() and file.parent.resolve() == run
        if is_recorded:
            check_trusted(file, modules_of(file), allow)


def _resumed_run(words: Sequence[str]) -> Path | None:
    """Return the directory of the run that a command line resumes; None if it starts a new one."""
    checkpoint = last_value_of(words, "ckpt_path")
    if not checkpoint:
        return None
    path = _expanded(checkpoint)
    if checkpoint == "last":
        path = _expanded(last_value_of(words, "run_dir")) / LAST
    run = run_of(path) or path.parent.parent
    return run.resolve()


def _expanded(text: str) -> Path:
    """Return a path as the parser of a run expands it later."""
    return Path(os.path.expandvars(os.path.expanduser(text)))  # noqa: PTH111


def check_trusted(file: str | Path, modules: Collection[str], allow: Collection[str]) -> None:
    """Raise `ConfigError` if a file names a module that is not allowed."""
    foreign = sorted(set(modules) - set(allow))
    if foreign:
        first = foreign[0]
        hint = f"if you trust it, add --trust_module {first}, or in Python allow=[{first!r}]."
        raise ConfigError(f"{file} would import {first}; {hint}")


def modules_of(config: Path) -> set[str]:
    """Return the foreign modules that parsing a recorded config would import.

    Raises:
        ConfigError: a value is an interpolation, which no recorded config has
    """
    content = read_config(config.parent, config.name)
    texts = list(_texts(content, ()))
    for path, value in texts:
        if "${" in value:
            key = f"{config}: {'.'.join(path)}"
            raise ConfigError(f"{key} is {value!r}; expected a value. The file was edited.")
    return _foreign(texts)


def modules_of_words(words: Sequence[str]) -> set[str]:
    """Return the foreign modules that words such as `--config FILE --key value` name.

    The modules that the files name are included.
    """
    # imported here, as in `read_config`
    from lightning_sv.settings.overrides import parse_overrides
    from lightning_sv.settings.yaml_file import read_yaml

    texts: list[Text] = []
    try:
        files, keys = parse_overrides(words, "fit")
        for file in files:
            texts += _texts(read_yaml(file, str(file)), ())
    except ConfigError:  # words of a different program, or of a run that `fit` refuses
        return set()
    for key, value in keys.items():
        names = filter(None, key.split("."))
        texts += _texts(value, tuple(names))
    return _foreign(texts)


def modules_of_settings(settings: Mapping[str, Any]) -> set[str]:
    """Return the foreign modules that the settings of a run name."""
    return _foreign(_texts(settings, ()))


def _foreign(texts: Iterable[Text]) -> set[str]:
    """Return the modules of others that the texts of a config name."""
    modules: set[str] = set()
    for keys, value in texts:
        modules |= _modules_of_text(keys, value)
    return {module for module in modules if _package(module) not in _OURS}


def _modules_of_text(keys: tuple[str, ...], value: str) -> set[str]:
    modules: set[str] = set()
    names_strategy = keys[0] == "model" and keys[1:] not in _PLAIN_TEXTS
    if names_strategy:
        modules |= modules_named(value)
    if _is_class(keys, value):
        module, _, _ = value.rpartition(".")
        modules.add(module)
    return modules


def _package(name: str) -> str:
    package, _, _ = name.partition(".")
    return package


def _is_class(keys: tuple[str, ...], value: str) -> bool:
    """Return True if a text is the dotted name of something to import."""
    if _DOTTED.fullmatch(value) is None:
        return False
    if keys[-1] == "class_path":
        return True
    return keys[0] not in _OUR_SECTIONS and _importable(value)


def _importable(name: str) -> bool:
    """Return False if the first part of a dotted name is no module, as in `perf.txt`."""
    try:
        return find_spec(_package(name)) is not None
    except ValueError:  # a module without a specification
        return True


def _texts(node: Any, path: tuple[str, ...]) -> Iterator[Text]:
    """Yield every text of a config with its path of keys."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _texts(child, (*path, str(key)))
    elif isinstance(node, list):
        for child in node:
            yield from _texts(child, path)
