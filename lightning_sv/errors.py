"""Errors that the command line reports in one sentence; any other exception is a bug."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin


class ConfigError(ValueError):
    """Report wrong input as `KEY is VALUE; expected EXPECTED. HINT`; the command exits with 2."""


class UnreadableError(ConfigError):
    """Report that a file cannot be read, which says nothing about its content."""


class NotTestableError(ConfigError):
    """Report why given runs cannot answer a question; the verdict is then "not testable here"."""


class RunError(RuntimeError):
    """Report that a run or one of its programs has failed; the command line exits with 1."""


class StoppedError(Exception):
    """Report that a signal stopped the run, after a step with a checkpoint.

    Attributes:
        code: exit code of the program
        requeue: if True, ask SLURM to requeue the job
    """

    def __init__(self, step: int, code: int, requeue: bool):
        super().__init__(f"stopped after step {step}, as asked by a signal")
        self.code = code
        self.requeue = requeue


def expect(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise `ConfigError` with the message `KEY is VALUE; expected EXPECTED` unless `ok`."""
    if not ok:
        raise ConfigError(f"{key} is {value}; expected {expected}")


#: annotation of a number -> classes of its values, and how a message names them
NUMBERS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((Integral,), "an integer"),
    int | None: ((Integral, NoneType), "an integer or None"),
    float: ((Real,), "a number"),
    float | None: ((Real, NoneType), "a number or None"),
    int | float | None: ((Real, NoneType), "a number or None"),
}


def expect_number(key: str, value: object, kind: Any) -> None:
    """Raise `ConfigError` if `kind`, an annotation, is a number and the value is not."""
    if kind not in NUMBERS:
        return
    classes, expected = NUMBERS[kind]
    if isinstance(value, classes):
        return
    hint = ""
    if isinstance(value, str) and _is_number(value):
        hint = " Remove the quotes; YAML also reads 1e-3 as text, and 1.0e-3 as a number."
    raise ConfigError(f"{key} is {value!r}; expected {expected}.{hint}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


#: type of another field -> the same
OTHER_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    list: ((list, tuple), "a list"),
    dict: ((Mapping,), "a dictionary"),
}


def expect_types(prefix: str, config: Any) -> None:
    """Raise `ConfigError` if a field of a config does not have the type of its annotation.

    Checked are numbers, booleans, choices, lists, dictionaries with values that are numbers, and
    nested configs.
    """
    for field in fields(config):
        _expect_type(f"{prefix}.{field.name}", getattr(config, field.name), field.type)


def _expect_type(key: str, value: Any, kind: Any) -> None:
    expect_number(key, value, kind)
    outer_kind = get_origin(kind) or kind
    if outer_kind is Literal:
        expect_known(key, value, get_args(kind))
    if is_dataclass(kind):
        expected = f"{outer_kind.__name__}(...), or a dictionary of its arguments."
        expect(isinstance(value, outer_kind), key, repr(value), expected)
    if outer_kind in OTHER_TYPES:
        classes, expected = OTHER_TYPES[outer_kind]
        expect(isinstance(value, classes), key, repr(value), f"{expected}.")
    if outer_kind is dict:
        _, kind_of_values = get_args(kind)
        for name, each in value.items():
            expect_number(f"{key}.{name}", each, kind_of_values)


def expect_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise `ConfigError` with the message of `unknown` unless `name` is known."""
    names = list(known)
    if name not in names:
        raise ConfigError(unknown(what, name, names))


def expect_fields(kind: Any, names: Iterable[str]) -> None:
    """Raise `ConfigError` unless all names are fields of the dataclass `kind`."""
    known = [field.name for field in fields(kind)]
    for name in names:
        expect_known(f"argument of {kind.__name__}", name, known)


def unknown(what: str, name: str, known: Iterable[str], near: str | None = None) -> str:
    """Return a message that lists the known names and suggests `near`, or else the closest one."""
    names = list(known)
    listed = " ".join(names) or "none (run it in the repository)"
    hint = f" Did you mean {near!r}?" if near else did_you_mean(name, names)
    return f"{what} {name!r} is unknown; known: {listed}.{hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is closest to `name`; empty if none is close."""
    return "".join(
        f" Did you mean {near!r}?" for near in get_close_matches(str(name), list(known), n=1)
    )
