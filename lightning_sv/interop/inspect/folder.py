"""Scale vectors of a saved transformers model.

The model is never loaded. Its configuration gives a model on fake tensors. The trace of that shows
which matrices read which vector. Then vectors are read at once, and matrices in blocks:

    config.json -> fake model -> norms        names and shapes
    *.safetensors -> gamma, sums |w_j|^2      values, of one block at a time
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    notes: list[str]  #: what the statistics omit, and why, one sentence each


def vectors_of_folder(
    folder: Path, example: Any = None, *, trust_remote_code: bool = False
) -> FoundVectors:
    """Return the scale vectors of a saved transformers model, with sums over their matrices.

    The model is traced on fake tensors and its values are read in blocks, so memory use does not
    grow with it. `example` is as in `weight_decay_roles`; a model of images or speech needs one.
    """
    transformers()  # requires safetensors
    weights = StoredWeights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    traced = TracedModel(model, example)
    matrices = _MatrixSums(StoredParameters(weights, model), traced.roles)
    vectors = []
    notes = []
    for norm in find_norms(traced):
        if norm.origin is None:
            why = "because gamma is not this parameter plus a constant"
            notes.append(f"{norm.vector} is omitted, {why}.")
        else:
            vectors.append(_stored(norm, norm.origin, matrices))
    return FoundVectors(type(model).__name__, vectors, [*notes, *matrices.notes()])


def _stored(norm: TracedNorm, origin: float, matrices: "_MatrixSums") -> StoredVector:
    """Return the vector of a norm as its file has it; gamma is that plus `origin`."""
    row = matrices.roles[norm.vector]
    parameters = matrices.parameters
    why = "" if row.redundant else str(norm.stays or "not only matrices read it")
    return StoredVector(
        name=norm.vector,
        role=row.role,
        stored=parameters.weights.read(parameters.key(norm.vector, row.shape)),
        origin=origin,
        why=why,
        matrices=matrices.behind(norm),
        shared=True,  # these matrices are the branches behind the norm
    )


class _MatrixSums:
    """Sums of squares of a folder's matrices, each read once."""

    def __init__(self, parameters: StoredParameters, roles: Roles):
        self.parameters = parameters
        self.roles = roles
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._omitted: dict[str, str] = {}  # name of a matrix without sums -> reason

    def behind(self, norm: TracedNorm) -> dict[str, Tensor]:
        """Return the sums of the matrices that read a norm's vector."""
        gamma_shape = self.roles[norm.vector].shape
        sums: dict[str, Tensor] = {}
        for matrix in norm.branches:
            width = self.roles[matrix.weight].shape[matrix.in_axis]
            reads_every_channel = gamma_shape == (width,)
            if reads_every_channel:
                sums |= self._of(matrix)
            else:  # no column per channel, for instance where rows of 4 patches are joined to one
                self._omitted[matrix.weight] = f"reads {norm.vector} with a different width"
        return sums

    def notes(self) -> list[str]:
        """Return a sentence per matrix without sums."""
        omit = "balance and agreement omit it."
        return [f"{name} {why}; {omit}" for name, why in self._omitted.items()]

    def _of(self, matrix: TracedBranch) -> dict[str, Tensor]:
        """Return the sums of each matrix in a weight; empty if it is stored differently."""
        name = matrix.weight
        if name not in self._sums:
            self._sums[name] = self._read(matrix)
        return self._sums[name]

    def _read(self, matrix: TracedBranch) -> dict[str, Tensor]:
        pieces = self.parameters.pieces(matrix.weight)
        is_unchanged = not any(piece.pattern for piece in pieces)
        if is_unchanged:
            return self._unchanged(matrix)
        if all(piece.stacked for piece in pieces):
            return self._stacked(matrix)
        self._omitted[matrix.weight] = "has an unknown storage format"
        return {}

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
