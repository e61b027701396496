"""Table of the claims that `lightning-sv theory` checks, in this order: each function with the decorator `claim`."""

from lightning_sv.theory.claims import (
    deep_linear,
    descent,
    heterogeneity,
    initial_std,
    limits,
    placement,
    reparameterization,
    theorem1,
    weight_decay,
)
from lightning_sv.theory.claims.base import Claim, Finding, Result

_MODULES = (
    theorem1,
    weight_decay,
    descent,
    heterogeneity,
    placement,
    reparameterization,
    deep_linear,
    limits,
    initial_std,
)
CLAIMS = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Claim))

__all__ = ["CLAIMS", "Claim", "Finding", "Result"]
