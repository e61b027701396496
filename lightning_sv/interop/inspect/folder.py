"""Scale vectors of a saved transformers model.

The model is never loaded. Its configuration gives a model on fake tensors. The trace of that shows
which matrices read which vector. Then vectors are read at once, and matrices in blocks:

    config.json -> fake model -> norms        names and shapes
    *.safetensors -> gamma, sums |w_j|^2      values, of one block at a time
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sv.errors import expect
from lightning_sv.interop.apply.find_norms import find_norms
from lightning_sv.interop.apply.matrices import TracedBranch
from lightning_sv.interop.apply.traced_norm import TracedNorm
from lightning_sv.interop.inspect.channels import channel_squares
from lightning_sv.interop.inspect.statistics import StoredVector
from lightning_sv.interop.inspect.stored import StoredParameters, StoredWeights
from lightning_sv.roles import Roles
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.fake import model_from_config, transformers


class FoundVectors(NamedTuple):
    """Scale vectors of a folder."""

    model: str  #: name of the model's class
    vectors: list[StoredVector]  #: scale vectors, in the model's order
    #: names of matrices stored in a different form than in the model, without statistics
    unread: list[str]


def vectors_of_folder(folder: Path, *, trust_remote_code: bool = False) -> FoundVectors:
    """Return the scale vectors of a saved transformers model, with sums over their matrices.

    The model is traced on fake tensors and its values are read in blocks, so memory use does not
    grow with it.
    """
    transformers()  # requires safetensors
    weights = StoredWeights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    traced = TracedModel(model)
    matrices = _MatrixSums(StoredParameters(weights, model), traced.roles)
    vectors = [_stored(norm, traced.roles, matrices) for norm in find_norms(traced)]
    return FoundVectors(type(model).__name__, vectors, matrices.unread())


def _stored(norm: TracedNorm, roles: Roles, matrices: "_MatrixSums") -> StoredVector:
    """Return the vector of a norm as its file has it."""
    row = roles[norm.vector]
    parameters = matrices.parameters
    why = "" if row.redundant else str(norm.stays or "not only matrices read it")
    sums: dict[str, Tensor] = {}
    for matrix in norm.branches:
        width = roles[matrix.weight].shape[matrix.in_axis]
        if row.shape == (width,):
            sums |= matrices.of(matrix)
    return StoredVector(
        name=norm.vector,
        role=row.role,
        stored=parameters.weights.read(parameters.key(norm.vector, row.shape)),
        origin=norm.origin or 0.0,
        why=why,
        matrices=sums,
        shared=True,
    )


class _MatrixSums:
    """Sums of squares of a folder's matrices, each read once."""

    def __init__(self, parameters: StoredParameters, roles: Roles):
        self.parameters = parameters
        self.roles = roles
        self._sums: dict[str, dict[str, Tensor]] = {}

    def of(self, matrix: TracedBranch) -> dict[str, Tensor]:
        """Return the sums of each matrix in a weight; empty if it is stored differently."""
        name = matrix.weight
        if name not in self._sums:
            pieces = self.parameters.pieces(name)
            if not any(piece.pattern for piece in pieces):
                self._sums[name] = self._unchanged(matrix)
            elif all(piece.stacked for piece in pieces):
                self._sums[name] = self._stacked(matrix)
            else:
                self._sums[name] = {}
        return self._sums[name]

    def unread(self) -> list[str]:
        """Return the names of the matrices that are stored differently."""
        return [name for name, sums in self._sums.items() if not sums]

    def _unchanged(self, matrix: TracedBranch) -> dict[str, Tensor]:
        name = matrix.weight
        shape = self.roles[name].shape
        key = self.parameters.key(name, shape)
        axis = matrix.in_axis - len(shape)
        sums = channel_squares(
            partial(self.parameters.weights.read, key), shape, axis, matrix.parts
        )
        if len(sums) == 1:
            return {name: sums[0]}
        return {f"{name}[{i}]": squares for i, squares in enumerate(sums)}

    def _stacked(self, matrix: TracedBranch) -> dict[str, Tensor]:
        """Return the sums over tensors of the same pattern, such as the gates of all experts."""
        name = matrix.weight
        shape = self.roles[name].shape
        axis = matrix.in_axis - len(shape)
        weights = self.parameters.weights
        sums: dict[str, Tensor] = {}
        for piece in self.parameters.pieces(name):
            part = weights.shape(piece.key)
            fits = len(part) == 2 and part[axis] == shape[axis]
            wanted = f"a part of {name}, {list(shape)}."
            expect(fits, f"the shape of {piece.key}", list(part), wanted)
            (squares,) = channel_squares(partial(weights.read, piece.key), part, axis)
            label = f"{name} ({piece.pattern})"
            sums[label] = sums.get(label, torch.zeros(())) + squares
        return sums
