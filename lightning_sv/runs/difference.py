"""The first difference of two nested settings."""

from typing import Any


def first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values of the first difference of two settings.

    The values are equal if there is no difference.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *then]):
            if then.get(name) != now.get(name):
                return first_difference(f"{key}.{name}", then.get(name), now.get(name))
    return key, then, now
