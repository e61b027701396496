"""The table of claims: what `lightning-sv theory` checks, in this order. One row more is one claim more."""

from lightning_sv.theory.claims import limits, placement, reparameterization, theorem1, weight_decay
from lightning_sv.theory.claims.base import Claim, Finding, Result

CLAIMS: tuple[Claim, ...] = (
    *theorem1.CLAIMS,
    *weight_decay.CLAIMS,
    *placement.CLAIMS,
    *reparameterization.CLAIMS,
    *limits.CLAIMS,
)

__all__ = ["CLAIMS", "Claim", "Finding", "Result"]
