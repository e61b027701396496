"""Table of the claims that `lightning-sv theory` checks, in this order: each function with the decorator `claim`."""

from importlib import import_module

from lightning_sv.theory.claims.base import Claim, Finding, Result

_FILES = (
    "theorem1", "weight_decay", "descent", "placement", "reparameterization", "deep_linear", "limits", "initial_std"
)  # fmt: skip
_MODULES = [import_module(f"{__name__}.{name}") for name in _FILES]
CLAIMS = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Claim))

__all__ = ["CLAIMS", "Claim", "Finding", "Result"]
