"""Table of the claims that `lightning-sv theory` checks: each function decorated by `claim`."""

from collections.abc import Iterator
from importlib import import_module

from lightning_sv.theory.claims.base import Claim, Finding, Result

#: files in the order of the table
_FILES = (
    "theorem1",
    "weight_decay",
    "descent",
    "placement",
    "reparameterization",
    "deep_linear",
    "limits",
    "initial_std",
)


def _claims() -> Iterator[Claim]:
    """Yield the claims of each file, in the order of their definition."""
    for name in _FILES:
        module = import_module(f"{__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, Claim):
                yield value


CLAIMS = tuple(_claims())

__all__ = ["CLAIMS", "Claim", "Finding", "Result"]
