"""Scale vectors of a backbone."""

import torch

from lightning_sv.interop.fold import foldable, stored_gamma
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.nn import Backbone
from lightning_sv.scale import ScaleVector, output_norms, scaled_linears


@torch.no_grad()
def vectors_of_backbone(model: Backbone) -> list[StoredVector]:
    """Return the scale vectors of a backbone.

    gamma is the output of the strategy's parameterization, comparable between `direct`, `or` and
    `er`.
    """
    why_of = _why_they_stay(model)
    vectors = []
    for name, module in model.named_modules():
        if isinstance(module, ScaleVector) and module in why_of:
            gamma = stored_gamma(module)
            vectors.append(StoredVector(name, module.role, gamma, 0.0, why_of[module]))
    return vectors


def _why_they_stay(model: Backbone) -> dict[ScaleVector, str]:
    """Return vector -> reason why matrices cannot absorb it, or ''."""
    why = {row.vector: row.why for row in foldable(model)}
    why_of: dict[ScaleVector, str] = {}
    for path, _, (scale_in, scale_out) in scaled_linears(model):
        if scale_in is not None:
            why_of.setdefault(scale_in, why[f"{path}.scale_in"])  # the first branch that reads it
        if scale_out is not None:
            why_of[scale_out] = why[f"{path}.scale_out"]
    for path, norm in output_norms(model):
        assert norm.scale is not None
        why_of[norm.scale] = why[f"{path}.scale"]
    return why_of
