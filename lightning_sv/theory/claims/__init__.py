"""Table of the claims that `lightning-sv theory` checks, in this order; add a row for a claim."""

from lightning_sv.theory.claims import (
    deep_linear,
    descent,
    heterogeneity,
    initial_std,
    limits,
    placement,
    reparameterization,
    theorem1,
    unified,
    weight_decay,
)
from lightning_sv.theory.claims.base import Claim, Finding, Result

CLAIMS: tuple[Claim, ...] = (
    *theorem1.CLAIMS,
    *weight_decay.CLAIMS,
    *descent.CLAIMS,
    *heterogeneity.CLAIMS,
    *placement.CLAIMS,
    *reparameterization.CLAIMS,
    *unified.CLAIMS,
    *deep_linear.CLAIMS,
    *limits.CLAIMS,
    *initial_std.CLAIMS,
)

__all__ = ["CLAIMS", "Claim", "Finding", "Result"]
