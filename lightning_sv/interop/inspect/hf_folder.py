"""Scale vectors of a transformers folder: roles from its configuration, values from its safetensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.sites import SiteMatrix, find_sites
from lightning_sv.interop.inspect.files import Piece, Weights
from lightning_sv.interop.inspect.vector_statistics import StoredVector, channel_squares
from lightning_sv.roles.api import traced_roles
from lightning_sv.roles.fake import model_from_config


@dataclass(frozen=True)
class FoundVectors:
    """Scale vectors of a folder.

    Attributes:
        model: name of the model's class
        vectors: scale vectors, in the model's order
        unread: names of matrices stored in another form than in the model, without statistics
    """

    model: str
    vectors: list[StoredVector]
    unread: list[str]


def vectors_of_folder(folder: Path, *, trust_remote_code: bool = False) -> FoundVectors:
    """Return the scale vectors of a saved transformers model, with sums over the matrices that read them.

    The model is traced on fake tensors and its values are read in blocks, so memory use does not grow with it.

    Args:
        folder: folder with config.json and *.safetensors, possibly several with an index
        trust_remote_code: run the modelling code in the folder

    Raises:
        ConfigError: as `weight_decay_roles`; no config; or weights that are pickled, missing, damaged, quantized, or of
            other shapes than in the configuration
    """
    weights = Weights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    trace, roles = traced_roles(model)
    pieces = weights.pieces(model)
    vectors: list[StoredVector] = []
    sums: dict[str, dict[str, Tensor]] = {}
    for site in find_sites(model, trace, roles):
        row = roles[site.vector]
        stored = weights.read(_only(site.vector, row.shape, pieces, weights))
        matrices: dict[str, Tensor] = {}
        for matrix in site.matrices:
            shape = roles[matrix.weight].shape
            if len(row.shape) == 1 and shape[matrix.in_axis] == row.shape[0]:
                if matrix.weight not in sums:
                    sums[matrix.weight] = _sums(matrix, shape, pieces, weights)
                matrices |= sums[matrix.weight]
        why = "" if row.redundant else site.stays or "not only matrices read it"
        vector = StoredVector(site.vector, row.role, stored, site.origin or 0.0, not why, why, matrices, shared=True)
        vectors.append(vector)
    return FoundVectors(type(model).__name__, vectors, [name for name, parts in sums.items() if not parts])


def _only(name: str, shape: tuple[int, ...], pieces: Mapping[str, list[Piece]], weights: Weights) -> str:
    """Return the key of a parameter that is stored unchanged."""
    stored = pieces.get(name, [])
    if len(stored) != 1 or stored[0].pattern is not None:
        raise ConfigError(
            f"{name} of the configuration's model is in the weights {'in another form' if stored else 'not'}; "
            "configuration and weights belong to different models."
        )
    if weights.shape(stored[0].key) != shape:
        raise ConfigError(
            f"the shape of {name} is {list(weights.shape(stored[0].key))} in the weights; expected {list(shape)}, as "
            "in the configuration. Configuration and weights belong to different models."
        )
    return stored[0].key


def _sums(
    matrix: SiteMatrix, shape: tuple[int, ...], pieces: Mapping[str, list[Piece]], weights: Weights
) -> dict[str, Tensor]:
    """Return the sums of squares of each matrix in a parameter; empty if it is stored in another form."""
    name, axis = matrix.weight, matrix.in_axis - len(shape)
    stored = pieces.get(name, [])
    if not any(piece.pattern for piece in stored):
        key = _only(name, shape, pieces, weights)
        sums = channel_squares(partial(weights.read, key), shape, axis, matrix.parts)
        return {name if len(sums) == 1 else f"{name}[{i}]": squares for i, squares in enumerate(sums)}
    if not all(piece.stacked for piece in stored):
        return {}
    by_pattern: dict[str, Tensor] = {}
    for piece in stored:
        part = weights.shape(piece.key)
        if len(part) != 2 or part[axis] != shape[axis]:
            raise ConfigError(f"the shape of {piece.key} is {list(part)}; expected a part of {name}, {list(shape)}.")
        (squares,) = channel_squares(partial(weights.read, piece.key), part, axis, (part[-3 - axis],))
        key = f"{name} ({piece.pattern})"
        by_pattern[key] = by_pattern.get(key, torch.zeros(())) + squares
    return by_pattern
