"""Classes in the section `trainer`: the common mistakes, each in a sentence."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.settings.overrides import option_value
from lightning_sv.settings.trainer import class_path, entries_of

_STRATEGY = "trainer.strategy"


def check_strategy_class(given: Mapping[str, Any]) -> None:
    """Reject arguments of a strategy without its class.

    Args:
        given: values of files and of the command line by dotted keys

    Raises:
        ConfigError: names the first argument
    """
    if _STRATEGY in given or f"{_STRATEGY}.class_path" in given:
        return
    for key, value in given.items():
        if key.startswith(f"{_STRATEGY}."):
            expected = f"{_STRATEGY}.class_path. E.g. lightning_sv.lit.fsdp.FullyShardedStrategy."
            raise ConfigError(f"{key} is {value}, without a class_path; expected {expected}")


def check_imports(given: Mapping[str, Any], command: str) -> None:
    """Reject callbacks that cannot be imported.

    Args:
        given: values of files and of the command line by dotted keys
        command: name of the command, for an error

    Raises:
        ConfigError: names the class and the error of its import
    """
    key = "trainer.callbacks"
    value = given.get(key, given.get(f"{key}.class_path"))
    if isinstance(value, str):
        value = option_value(key, value, command)
    for path in map(class_path, entries_of(value)):
        is_dotted = "." in path  # a name alone is that of a class of Lightning
        if is_dotted and "${" not in path:
            _check_import(key, path)


def _check_import(key: str, path: str) -> None:
    try:
        resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: not a name at all
        expected = "a class that can be imported"
        raise ConfigError(f"{key} is {path}; expected {expected}. {error}.") from error
