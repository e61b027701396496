"""Your own code in settings: names such as `package.module:Name`, imported when used."""

import importlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_sv.errors import ConfigError, expect, expect_known

_NAME = re.compile(r"([\w.]+):\w+")
_T = TypeVar("_T")


def modules_named(value: object) -> set[str]:
    """Return the modules that using a setting would import, without importing them.

    >>> sorted(modules_named("hg+my_module:MyScale"))
    ['my_module']
    """
    return set(_NAME.findall(value)) if isinstance(value, str) else set()


def import_name(name: str, key: str) -> Any:
    """Return the object that `package.module:Name` names; errors begin with `key`."""
    try:
        module, attribute = name.split(":")
        assert _NAME.fullmatch(name), "other characters"  # `modules_named` would miss the module
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module can raise anything on import
        wanted = "'package.module:Name' of a package on PYTHONPATH."
        raise ConfigError(
            f"{key} {name!r} cannot be imported ({error}); expected {wanted}"
        ) from error


def find(table: Mapping[str, _T], name: str, key: str) -> _T:
    """Return a row of the table, or the object of `package.module:Name`; errors name `key`."""
    if ":" in name:
        found: _T = import_name(name, key)
        functions = all(map(callable, table.values()))
        expect(
            callable(found) or not functions,
            key,
            f"{name}, a {type(found).__name__}",
            "a function.",
        )
        return found
    expect_known(key, name, [*table, "package.module:Name"])
    return table[name]
