"""Tensors of safetensors files, opened only while a block of one is read.

Transformers stores some models in a different form than it runs them: experts have a file tensor
each, and are one parameter of the model. Its own table of names tells which stored tensors become
a parameter:

    ...experts.0.gate_proj.weight (d_expert, d)  |
    ...experts.1.gate_proj.weight                |->  ...experts.gate_up_proj (n, 2 d_expert, d)
    ...experts.0.up_proj.weight                  |
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_sv.atomic import reading, regular
from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.groups import unwrapped

_NUMBERS = ("F64", "F32", "F16", "BF16")
_MISMATCH = (
    "configuration and weights belong to different models, "
    "or the model was saved before fold_applied"
)
#: transformers' operations from stored tensors to a parameter that keep each channel in place
_STACKED = {"MergeModulelist", "Concatenate"}


class Piece(NamedTuple):
    """A stored tensor that becomes a parameter, or a part of one."""

    key: str  #: key in the file
    pattern: str | None  #: transformers' pattern that matched it; None if it is the parameter
    stacked: bool  #: True if it is only stacked with others


class StoredWeights:
    """Tensors of all *.safetensors of a folder.

    Raises:
        ConfigError: the folder has none
    """

    def __init__(self, folder: Path):
        self.file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with opened(regular(path)) as file:
                self.file_of |= dict.fromkeys(file.keys(), path)
        if not self.file_of:
            wanted = "a run, or config.json and weights"
            hint = "Pickled weights (*.bin, *.pt) are not loaded, because they can run code."
            raise ConfigError(f"{folder} has no *.safetensors; expected {wanted}. {hint}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        path = self.file_of[key]
        with opened(path) as file:
            stored = file.get_slice(key)
            shape = tuple(stored.get_shape())
            dtype = stored.get_dtype()
        wanted = f"one of {' '.join(_NUMBERS)}. Inspect the model before quantization."
        expect(dtype in _NUMBERS, f"{path}: the dtype of {key}", dtype, wanted)
        return shape

    def read(
        self, key: str, index: tuple[int, ...] = (), start: int = 0, end: int | None = None
    ) -> Tensor:
        """Return a copy of rows `start` to `end` of matrix `index` of a stored tensor."""
        with opened(self.file_of[key]) as file:  # close the file to release its pages
            block: Tensor = file.get_slice(key)[(*index, slice(start, end))]
            return block.clone()


class StoredParameters:
    """The parameters of a transformers model in a folder.

    `model` is on fake tensors.
    """

    def __init__(self, weights: StoredWeights, model: nn.Module):
        self.weights = weights
        self._pieces = _pieces(weights, model)

    def pieces(self, name: str) -> list[Piece]:
        """Return the stored tensors of a parameter."""
        return self._pieces.get(name, [])

    def key(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the key of a parameter that is stored unchanged.

        Raises:
            ConfigError: it is missing, or has a different shape
        """
        pieces = self.pieces(name)
        is_single = len(pieces) == 1 and pieces[0].pattern is None
        if not is_single or self.weights.shape(pieces[0].key) != shape:
            what = f"{name} of shape {list(shape)} is missing in the weights"
            wanted = "the parameters of the configuration's model"
            raise ConfigError(f"{what}; expected {wanted}. A file is missing, or {_MISMATCH}.")
        return pieces[0].key


def _pieces(weights: StoredWeights, model: nn.Module) -> dict[str, list[Piece]]:
    """Return parameter -> stored tensors, by transformers' table of names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)  # type: ignore[no-untyped-call,unused-ignore]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    prefix: Any = model.base_model_prefix
    names: Any = model.state_dict()
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for key in sorted(weights.file_of):
        name, pattern = rename_source_key(unwrapped(key), renamings, converters, prefix, names)
        operations = _operations(converters, pattern)
        pieces[name].append(Piece(key, pattern, stacked=operations <= _STACKED))
    return pieces


def _operations(converters: list[Any], pattern: str | None) -> set[str]:
    """Return the names of the operations on the tensors that a pattern matches."""
    operations: set[str] = set()
    for converter in converters:
        if pattern in converter.source_patterns:
            operations.update(type(step).__name__ for step in converter.operations)
    return operations


def opened(path: Path) -> Any:
    """Open a file of safetensors.

    Raises:
        ConfigError: it cannot be read
    """
    from safetensors import SafetensorError, safe_open

    with reading(path), path.open("rb"):  # safetensors calls a file that it cannot open damaged
        pass
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        what = f"{path} cannot be read as safetensors ({error})"
        raise ConfigError(f"{what}; use a different file.") from error
