"""A folder's safetensors: which stored tensor is which parameter, and its numbers in blocks."""

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
#: what transformers may do to tensors on the way to a parameter that leaves each channel where it is
_STACKED = {"MergeModulelist", "Concatenate"}


@dataclass(frozen=True)
class Piece:
    """A stored tensor that becomes a parameter, or a part of one.

    Attributes:
        key: in the file
        pattern: of transformers' that it was matched by; None where it is the parameter itself
        stacked: it is stacked with others, and nothing else is done to it
    """

    key: str
    pattern: str | None
    stacked: bool


class Weights:
    """The tensors of all *.safetensors of a folder, never opened for longer than a block is read.

    Args:
        folder: as save_pretrained writes it

    Raises:
        ConfigError: no such files, one is missing or damaged, or weights are pickled
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give one with config.json and *.safetensors.")
        files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
        index = folder / "model.safetensors.index.json"
        if regular(index).exists():
            files = {name: folder / name for name in _files_of(index)}
        if not files:
            pickled = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
            raise ConfigError(
                f"{folder} has no *.safetensors"
                + (f"; {pickled[0]} is a pickle, which could run code and is never opened: save it as safetensors."
                   if pickled else "; give a folder with a model's weights.")
            )  # fmt: skip
        self.file_of: dict[str, Path] = {}
        for name, path in files.items():
            if not path.is_file():
                raise ConfigError(f"{folder} has no {name}, which {index.name} names; the download is not complete.")
            with _opened(path) as file:
                self.file_of |= dict.fromkeys(file.keys(), path)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the sizes of a stored tensor.

        Raises:
            ConfigError: its numbers are no plain floats
        """
        with _opened(self.file_of[key]) as file:
            stored = file.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if dtype not in _NUMBERS:
            raise ConfigError(
                f"{self.file_of[key]}: {key} is stored as {dtype}: quantized numbers are not those of the model; "
                "inspect the model before that."
            )
        return shape

    def read(self, key: str, index: tuple[int, ...] = (), start: int = 0, end: int | None = None) -> Tensor:
        """Return rows `start` to `end` of matrix `index` of a stored tensor, a copy."""
        with _opened(self.file_of[key]) as file:  # closed again, or the file's pages would stay
            block: Tensor = file.get_slice(key)[(*index, slice(start, end))]
            return block.clone()

    def pieces(self, model: nn.Module) -> dict[str, list[Piece]]:
        """Return parameter -> stored tensors, by transformers' own table of how checkpoints are named.

        Args:
            model: of transformers, on fake tensors
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(model)  # type: ignore[no-untyped-call,unused-ignore]
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        names: Any = model.state_dict()
        found: dict[str, list[Piece]] = defaultdict(list)
        for key in sorted(self.file_of):
            plain = unwrapped(key)
            name, pattern = rename_source_key(plain, renamings, converters, model.base_model_prefix, names)
            done = {
                type(step).__name__
                for converter in converters
                if pattern in converter.source_patterns
                for step in converter.operations
            }
            found[name].append(Piece(key, pattern, done <= _STACKED))
        return found


def _files_of(index: Path) -> list[str]:
    try:
        named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is no index of weights ({type(error).__name__}).") from error
    for name in named:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}, which is no *.safetensors beside it; it is not opened.")
    return named


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs safetensors ({error}); make install-hf, or pip install 'safetensors'."
        ) from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}); it is damaged, or no such file.") from error
