"""Comparison of recorded settings with those of this run."""

from typing import Any

from lightning_sv.errors import ConfigError


def first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values of the first difference of two settings.

    The values are equal if there is no difference.
    """
    if not isinstance(then, dict) or not isinstance(now, dict):
        return key, then, now
    for name in now | then:
        value_then = then.get(name)
        value_now = now.get(name)
        if value_then != value_now:
            return first_difference(f"{key}.{name}", value_then, value_now)
    return key, then, now


def check_same(key: str, then: Any, now: Any, origin: str, hint: str) -> None:
    """Check that two settings are equal.

    Args:
        key: name of the settings
        then: recorded settings
        now: settings of this run
        origin: place of the recorded settings, e.g. "the checkpoint"
        hint: sentence at the end of the error

    Raises:
        ConfigError: the message has the first key that differs, and both values
    """
    name, expected, value = first_difference(key, then, now)
    if value != expected:
        raise ConfigError(f"{name} is {value}; expected {expected}, as in {origin}. {hint}")
