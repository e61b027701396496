"""Scale vectors: parameterizations, placements, strategies and the branches they act on."""

from lightning_sv.scale.branch import (
    Branch,
    BranchGroup,
    Output,
    ScaledLinear,
    output_norms,
    scaled_linears,
)
from lightning_sv.scale.build import ScaleBuilder
from lightning_sv.scale.fast import normalize
from lightning_sv.scale.norm import RMSNorm
from lightning_sv.scale.options import ScaleOptions, expand_preset
from lightning_sv.scale.strategy import Decay, Placement, ScaleStrategy
from lightning_sv.scale.vector import (
    DirectScale,
    ExponentialScale,
    OffsetScale,
    OriginalSpaceScale,
    ScaleVector,
)

__all__ = [
    "Branch",
    "BranchGroup",
    "Decay",
    "DirectScale",
    "ExponentialScale",
    "OffsetScale",
    "OriginalSpaceScale",
    "Output",
    "Placement",
    "RMSNorm",
    "ScaleBuilder",
    "ScaleOptions",
    "ScaleStrategy",
    "ScaleVector",
    "ScaledLinear",
    "expand_preset",
    "normalize",
    "output_norms",
    "scaled_linears",
]
