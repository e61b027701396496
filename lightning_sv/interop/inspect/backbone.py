"""The scale vectors of a run of ours: its modules say what each is and which matrices are beside it."""

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
    """Return the scale vectors of a backbone; matrices are read in blocks, so that they may be mapped from a file.

    gamma is taken as the strategy's parameterization gives it, so that `or` and `er` are seen as `direct` is. Beside an
    input-side vector are the matrices that read it; beside an output-side one the matrix before it, if no norm is
    between.

    Args:
        model: with any strategy
    """
    becomes = {row.vector: row for row in foldable(model)}
    found: dict[ScaleVector, dict[str, Any]] = {}
    for path, branch, vectors in scaled_linears(model):
        for side, vector in zip(("scale_in", "scale_out"), vectors, strict=True):
            if vector is None:
                continue
            row = becomes[f"{path}.{side}"]
            entry = found.setdefault(vector, {"matrices": {}, "shared": side == "scale_in", "why": row.why})
            if side == "scale_in" or branch.norm_width is None:
                entry["matrices"][path] = _squares(branch.weight, -1 if side == "scale_in" else -2)
    for path, norm in output_norms(model):
        assert norm.scale is not None
        found[norm.scale] = {"matrices": {}, "shared": False, "why": becomes[f"{path}.scale"].why}
    names = {module: name for name, module in model.named_modules()}
    return [
        StoredVector(names[vector], vector.role, _gamma(vector), 0.0, not entry["why"], **entry)
        for vector, entry in sorted(found.items(), key=lambda item: list(names).index(item[0]))
    ]


def _squares(weight: nn.Parameter, axis: int) -> Tensor:
    widths = (weight.shape[-3 - axis],)
    (squares,) = channel_squares(lambda index, start, end: weight[index][start:end], tuple(weight.shape), axis, widths)
    return squares


def _gamma(vector: ScaleVector) -> Tensor:
    gamma: Tensor = vector.vector() if isinstance(vector, HeadShared) else vector()
    return gamma
