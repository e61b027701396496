"""Modules of users that settings name, and whether reading a checkpoint may import them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.own_code import modules_named

#: packages whose classes are not of a user
_OURS = ("lightning", "lightning_sv", "torch")
#: last keys whose texts are classes
_CLASSES = ("class_path", "callbacks", "callbacks+")


def allow_words(modules: Collection[str]) -> list[str]:
    """Return the command-line words that allow modules."""
    words: list[str] = []
    for module in sorted(modules):
        words += ["--trust_module", module]
    return words


def check_trusted(file: str | Path, modules: Collection[str], allow: Collection[str]) -> None:
    """Raise `ConfigError` if a file names a module that is not allowed."""
    foreign = sorted(set(modules) - set(allow))
    if foreign:
        first = foreign[0]
        hint = f"if you trust it, add --trust_module {first}, or in Python allow=[{first!r}]."
        raise ConfigError(f"{file} would import {first}; {hint}")


def modules_of_words(words: Sequence[str]) -> set[str]:
    """Return the modules of users that words such as `--config FILE --key value` name.

    The modules that the files name are included.
    """
    # imported here, because they import omegaconf
    from lightning_sv.settings.overrides import parse_overrides
    from lightning_sv.settings.yaml_file import read_yaml

    modules: set[str] = set()
    try:
        files, values = parse_overrides(words, "fit")
        for file in files:
            modules |= _modules_at((), read_yaml(file, str(file)))
    except ConfigError:  # words of a different program, or of a run that `fit` refuses
        return set()
    for key, value in values.items():
        names = tuple(filter(None, key.split(".")))
        modules |= _modules_at(names, value)
    return modules


def _modules_at(path: tuple[str, ...], settings: Any) -> set[str]:
    """Return the modules of users that the settings below a path of keys name."""
    modules: set[str] = set()
    for keys, text in _texts(settings, path):
        if keys[0] == "model":  # strategies and optimizers: `module:Name`
            modules |= modules_named(text)
        if keys[-1] in _CLASSES:  # `module.Name`
            module, _, _ = text.rpartition(".")
            modules.add(module)
    return {module for module in modules if module.partition(".")[0] not in ("", *_OURS)}


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
