"""Scale vectors of a run of this package, with roles and matrices from its modules."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sv.interop.fold import foldable
from lightning_sv.interop.inspect.vector_statistics import StoredVector, channel_squares
from lightning_sv.nn import Backbone
from lightning_sv.scale import ScaleVector, output_norms, scaled_linears
from lightning_sv.scale.vector import HeadShared


@torch.no_grad()
def vectors_of_backbone(model: Backbone) -> list[StoredVector]:
    """Return the scale vectors of a backbone; matrices are read in blocks, so they may be memory-mapped.

    gamma is the output of the strategy's parameterization, comparable between `direct`, `or` and `er`. The matrices of
    an input-side vector are those that read it; that of an output-side vector precedes it, if no norm is in between.

    Args:
        model: backbone with any strategy
    """
    foldings = {row.vector: row for row in foldable(model)}
    entries: dict[ScaleVector, dict[str, Any]] = {}
    for path, branch, vectors in scaled_linears(model):
        for side, vector in zip(("scale_in", "scale_out"), vectors, strict=True):
            if vector is None:
                continue
            row = foldings[f"{path}.{side}"]
            entry = entries.setdefault(vector, {"matrices": {}, "shared": side == "scale_in", "why": row.why})
            if side == "scale_in" or branch.norm_width is None:
                entry["matrices"][path] = _squares(branch.weight, -1 if side == "scale_in" else -2)
    for path, norm in output_norms(model):
        assert norm.scale is not None
        entries[norm.scale] = {"matrices": {}, "shared": False, "why": foldings[f"{path}.scale"].why}
    names = {module: name for name, module in model.named_modules()}
    return [
        StoredVector(names[vector], vector.role, _gamma(vector), 0.0, not entry["why"], **entry)
        for vector, entry in sorted(entries.items(), key=lambda item: list(names).index(item[0]))
    ]


def _squares(weight: nn.Parameter, axis: int) -> Tensor:
    widths = (weight.shape[-3 - axis],)
    (squares,) = channel_squares(lambda index, start, end: weight[index][start:end], tuple(weight.shape), axis, widths)
    return squares


def _gamma(vector: ScaleVector) -> Tensor:
    gamma: Tensor = vector.vector() if isinstance(vector, HeadShared) else vector()
    return gamma
