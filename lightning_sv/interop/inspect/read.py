"""Scale vectors of a transformers folder, from its configuration and its safetensors, and of a run of this package."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sv.atomic import regular
from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.sites import SiteMatrix, find_sites
from lightning_sv.interop.fold import foldable
from lightning_sv.interop.groups import unwrapped
from lightning_sv.interop.inspect.vector_statistics import StoredVector, channel_squares
from lightning_sv.nn import Backbone
from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.fake import model_from_config, transformers
from lightning_sv.scale import ScaleVector, output_norms, scaled_linears
from lightning_sv.scale.vector import HeadShared

_NUMBERS = ("F64", "F32", "F16", "BF16")
_MISMATCH = "configuration and weights belong to different models, or the model was saved before fold_applied"
#: transformers' operations from stored tensors to a parameter that keep each channel in place
_STACKED = {"MergeModulelist", "Concatenate"}


@dataclass(frozen=True)
class Piece:
    """A stored tensor that becomes a parameter, or a part of one."""

    key: str  #: key in the file
    pattern: str | None  #: transformers' pattern that matched it; None if it is the parameter itself
    stacked: bool  #: True if it is only stacked with others


class Weights:
    """Tensors of all *.safetensors of a folder, opened only while a block is read.

    Args:
        folder: folder written by save_pretrained

    Raises:
        ConfigError: no such files, one is damaged, or weights are pickled
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder; expected a run directory, or a folder with config.json and *.safetensors."
            )
        self.file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _opened(regular(path)) as file:
                self.file_of |= dict.fromkeys(file.keys(), path)
        if not self.file_of:
            raise ConfigError(
                f"{folder} has no *.safetensors; expected a folder with a model's weights. Pickled weights (*.bin, "
                "*.pt) are not loaded, because they can run code."
            )

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor.

        Raises:
            ConfigError: its dtype is not a plain float
        """
        with _opened(self.file_of[key]) as file:
            stored = file.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if dtype not in _NUMBERS:
            raise ConfigError(
                f"{self.file_of[key]}: {key} is stored as {dtype}; expected one of {' '.join(_NUMBERS)}. "
                "Inspect the model before quantization."
            )
        return shape

    def read(self, key: str, index: tuple[int, ...] = (), start: int = 0, end: int | None = None) -> Tensor:
        """Return a copy of rows `start` to `end` of matrix `index` of a stored tensor."""
        with _opened(self.file_of[key]) as file:  # close the file to release its pages
            block: Tensor = file.get_slice(key)[(*index, slice(start, end))]
            return block.clone()

    def pieces(self, model: nn.Module) -> dict[str, list[Piece]]:
        """Return parameter -> stored tensors, by transformers' table of checkpoint names.

        Args:
            model: transformers model on fake tensors
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(model)  # type: ignore[no-untyped-call,unused-ignore]
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        names: Any = model.state_dict()
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for key in sorted(self.file_of):
            plain = unwrapped(key)
            name, pattern = rename_source_key(plain, renamings, converters, model.base_model_prefix, names)
            operations = {
                type(step).__name__
                for converter in converters
                if pattern in converter.source_patterns
                for step in converter.operations
            }
            pieces[name].append(Piece(key, pattern, operations <= _STACKED))
        return pieces


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as safetensors ({error}); it is damaged or in a different format."
        ) from error


@dataclass(frozen=True)
class FoundVectors:
    """Scale vectors of a folder."""

    model: str  #: name of the model's class
    vectors: list[StoredVector]  #: scale vectors, in the model's order
    unread: list[str]  #: names of matrices stored in a different form than in the model, without statistics


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
    transformers()  # requires safetensors
    weights = Weights(folder)  # before running code of the folder
    model = model_from_config(folder, trust_remote_code=trust_remote_code)
    traced = TracedModel(model)
    roles = traced.roles
    pieces = weights.pieces(model)
    vectors: list[StoredVector] = []
    sums: dict[str, dict[str, Tensor]] = {}
    for site in find_sites(traced):
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
            f"{name} is {'in a different form' if stored else 'missing'} in the weights; expected the parameters of "
            f"the configuration's model. A file is missing, or {_MISMATCH}."
        )
    if weights.shape(stored[0].key) != shape:
        raise ConfigError(
            f"the shape of {name} is {list(weights.shape(stored[0].key))} in the weights; expected {list(shape)}, as "
            f"in the configuration. Perhaps {_MISMATCH}."
        )
    return stored[0].key


def _sums(
    matrix: SiteMatrix, shape: tuple[int, ...], pieces: Mapping[str, list[Piece]], weights: Weights
) -> dict[str, Tensor]:
    """Return the sums of squares of each matrix in a parameter; empty if it is stored in a different form."""
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
