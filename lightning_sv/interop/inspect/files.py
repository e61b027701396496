"""safetensors of a folder: mapping of stored tensors to parameters, and reading in blocks."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_sv.atomic import regular
from lightning_sv.errors import ConfigError
from lightning_sv.interop.groups import unwrapped

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_NUMBERS = ("F64", "F32", "F16", "BF16")
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
        ConfigError: no such files, one is missing or damaged, or weights are pickled
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; expected one with config.json and *.safetensors.")
        files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
        index = folder / "model.safetensors.index.json"
        if regular(index).exists():
            files = {name: folder / name for name in _files_of(index)}
        if not files:
            pickled = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
            raise ConfigError(
                f"{folder} has no *.safetensors"
                + (f"; {pickled[0]} is a pickle, which is not loaded, because it can run code. Save it as safetensors."
                   if pickled else "; expected a folder with a model's weights.")
            )  # fmt: skip
        self.file_of: dict[str, Path] = {}
        for name, path in files.items():
            if not path.is_file():
                raise ConfigError(
                    f"{folder} has no {name}, although {index.name} names it; the download is incomplete."
                )
            with _opened(path) as file:
                self.file_of |= dict.fromkeys(file.keys(), path)

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


def _files_of(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not an index of weights ({type(error).__name__}).") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}; expected *.safetensors in the same folder.")
    return names


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            f"safetensors is not installed, for {path} ({error}); run make install-hf, or pip install safetensors."
        ) from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read as safetensors ({error}); it is damaged or in another format."
        ) from error
