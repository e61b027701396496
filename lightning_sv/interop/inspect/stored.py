"""Tensors of safetensors files.

Transformers stores some models in a different form than it runs them. Its own table of names tells
which parameter a stored tensor becomes, and whether an operation changes it on the way.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_sv.atomic import reading, regular
from lightning_sv.errors import ConfigError, expect

_NUMBERS = ("F64", "F32", "F16", "BF16")
_MISMATCH = (
    "configuration and weights belong to different models, "
    "or the model was saved before fold_applied"
)


class StoredWeights:
    """Tensors of all *.safetensors of a folder.

    Raises:
        ConfigError: it is no folder, or has none
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            found = "a file" if folder.exists() else "missing"
            wanted = "a run directory, or a folder with config.json and *.safetensors"
            hint = f"For a model of the hub, first run hf download {folder} --local-dir DIR."
            raise ConfigError(f"{folder} is {found}; expected {wanted}. {hint}")
        self.file_of: dict[str, Any] = {}  #: key -> its open file
        for path in sorted(folder.glob("*.safetensors")):
            file = opened(regular(path))
            self.file_of |= dict.fromkeys(file.keys(), file)
        if not self.file_of:
            wanted = "a run, or config.json and weights"
            hint = "Pickled weights (*.bin, *.pt) are not loaded, because they can run code."
            raise ConfigError(f"{folder} has no *.safetensors; expected {wanted}. {hint}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        stored = self.file_of[key].get_slice(key)
        dtype = stored.get_dtype()
        wanted = f"one of {' '.join(_NUMBERS)}. Inspect the model before quantization."
        expect(dtype in _NUMBERS, f"the dtype of {key}", dtype, wanted)
        return tuple(stored.get_shape())

    def read(self, key: str) -> Tensor:
        """Return a stored tensor."""
        stored: Tensor = self.file_of[key].get_tensor(key)
        return stored


class StoredParameters:
    """The parameters of a transformers model in a folder that are stored unchanged.

    `model` is on fake tensors.
    """

    def __init__(self, weights: StoredWeights, model: nn.Module):
        self.weights = weights
        self._keys = _unchanged_keys(weights, model)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values of a parameter.

        Raises:
            ConfigError: it is missing, or has a different shape
        """
        key = self._keys.get(name)
        if key is None or self.weights.shape(key) != shape:
            what = f"{name} of shape {list(shape)} is missing in the weights"
            wanted = "the parameters of the configuration's model"
            raise ConfigError(f"{what}; expected {wanted}. A file is missing, or {_MISMATCH}.")
        return self.weights.read(key)


def _unchanged_keys(weights: StoredWeights, model: nn.Module) -> dict[str, str]:
    """Return parameter -> key of the stored tensor, by transformers' table of names."""
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
    keys = {}
    for key in sorted(weights.file_of):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        is_unchanged = pattern is None
        if is_unchanged:
            keys[name] = key
    return keys


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
