"""Scale vectors of a backbone."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_sv.interop.fold import foldable, stored_gamma
from lightning_sv.interop.inspect.channels import channel_squares
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.nn import Backbone
from lightning_sv.scale import ScaleVector, output_norms, scaled_linears
from lightning_sv.scale.branch import ScaledLinear


@dataclass
class _Surroundings:
    """What is next to a vector; several branches can read one."""

    why: str
    shared: bool
    matrices: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def vectors_of_backbone(model: Backbone) -> list[StoredVector]:
    """Return the scale vectors of a backbone; its matrices may be memory-mapped.

    gamma is the output of the strategy's parameterization, comparable between `direct`, `or` and
    `er`. The matrices of an input-side vector are those that read it; that of an output-side vector
    precedes it, if no norm is in between.
    """
    surroundings = _surroundings(model)
    vectors = []
    for name, module in model.named_modules():
        if isinstance(module, ScaleVector) and module in surroundings:
            vectors.append(_stored(name, module, surroundings[module]))
    return vectors


def _surroundings(model: Backbone) -> dict[ScaleVector, _Surroundings]:
    """Return what is next to each vector."""
    why = {row.vector: row.why for row in foldable(model)}
    surroundings: dict[ScaleVector, _Surroundings] = {}
    for path, branch, (scale_in, scale_out) in scaled_linears(model):
        if scale_in is not None:
            if scale_in not in surroundings:
                surroundings[scale_in] = _Surroundings(why[f"{path}.scale_in"], shared=True)
            surroundings[scale_in].matrices[path] = _squares(branch.weight, axis=-1)
        if scale_out is not None:
            surroundings[scale_out] = _after(path, branch, why[f"{path}.scale_out"])
    for path, norm in output_norms(model):
        assert norm.scale is not None
        surroundings[norm.scale] = _Surroundings(why[f"{path}.scale"], shared=False)
    return surroundings


def _after(path: str, branch: ScaledLinear, why: str) -> _Surroundings:
    """Return what is next to the vector after a branch: its matrix, if no norm is in between."""
    entry = _Surroundings(why, shared=False)
    if branch.norm_width is None:
        entry.matrices[path] = _squares(branch.weight, axis=-2)
    return entry


def _stored(name: str, vector: ScaleVector, entry: _Surroundings) -> StoredVector:
    return StoredVector(
        name=name,
        role=vector.role,
        stored=stored_gamma(vector),
        origin=0.0,
        why=entry.why,
        matrices=entry.matrices,
        shared=entry.shared,
    )


def _squares(weight: nn.Parameter, axis: int) -> Tensor:
    """Return ||w_j||^2 of the channels j along an axis, (*batch_dims, channels)."""

    def rows(index: tuple[int, ...], start: int, end: int) -> Tensor:
        return weight[index][start:end]

    (squares,) = channel_squares(rows, tuple(weight.shape), axis)
    return squares
