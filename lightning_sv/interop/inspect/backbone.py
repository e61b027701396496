"""Scale vectors of a backbone."""

import torch

from lightning_sv.interop.fold import foldings, stored_gamma
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.nn import Backbone
from lightning_sv.scale import ScaleVector


@torch.no_grad()
def vectors_of_backbone(model: Backbone) -> list[StoredVector]:
    """Return the scale vectors of a backbone.

    gamma is the output of the strategy's parameterization, comparable between `direct`, `or` and
    `er`.
    """
    why_of = {vector: row.why for vector, row in foldings(model)}  # '' if matrices can absorb it
    vectors = []
    for name, module in model.named_modules():
        if isinstance(module, ScaleVector) and module in why_of:
            gamma = stored_gamma(module)
            vectors.append(StoredVector(name, module.role, gamma, 0.0, why_of[module]))
    return vectors
