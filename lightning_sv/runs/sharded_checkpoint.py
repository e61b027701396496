"""Sharded checkpoints: a folder of `torch.distributed.checkpoint` (DCP) with one file per rank.

Keys of the tensors: `model/NAME`, and `optimizer/INDEX/NAME/KEY` for an optimizer's state. `meta.pt` has the rest of
Lightning's checkpoint. DCP writes `.metadata` last, so a folder without it is incomplete.
"""

import pickle
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_sv.errors import ConfigError

#: file with everything but the tensors; Lightning's name
META = "meta.pt"
#: entry of META: names, values and parameter names of each optimizer's groups
GROUPS = "optimizer_groups"
_INDEX = ".metadata"
_PATHS = {"PosixPath", "WindowsPath"}
#: classes in DCP's index of tensors; unpickling others could execute code
_SAFE: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
}  # fmt: skip


def is_sharded(path: str | Path) -> bool:
    """Return whether a path is a sharded checkpoint, complete or not."""
    return (Path(path) / META).is_file()


def flat_tensors(model: dict[str, Any], optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all tensors under the keys of a sharded checkpoint.

    `optimizers` are state dicts with parameter names, as `get_optimizer_state_dict` returns them.
    """
    states = {
        f"optimizer/{index}/{name}/{key}": value
        for index, optimizer in enumerate(optimizers)
        for name, state in optimizer["state"].items()
        for key, value in state.items()
    }
    return {f"model/{name}": value for name, value in model.items()} | states


def unflatten(tensors: dict[str, Any], groups: list[list[dict[str, Any]]]) -> tuple[dict[str, Any], list[Any]]:
    """Return the state dicts of the model and of the optimizers, the inverse of `flat_tensors`."""
    model: dict[str, Any] = {}
    optimizers: list[Any] = [{"state": {}, "param_groups": each} for each in groups]
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "model":
            model[name] = value
        else:
            index, name, entry = name.split("/")
            optimizers[int(index)]["state"].setdefault(name, {})[entry] = value
    return model, optimizers


def number_parameters(named: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with numbers for parameter names, in the order of its groups, as torch's own."""
    number = {name: i for i, name in enumerate(chain.from_iterable(g["params"] for g in named["param_groups"]))}
    return {
        "state": {number[name]: state for name, state in named["state"].items()},
        "param_groups": [g | {"params": [number[name] for name in g["params"]]} for g in named["param_groups"]],
    }


def read_sharded(path: str | Path, *, tensors: bool) -> dict[str, Any]:
    """Read a sharded checkpoint in one process, as a file's dictionary; without `tensors` they are on meta."""
    folder = Path(path)
    try:
        index = _read_index(folder)
        checkpoint: dict[str, Any] = torch.load(folder / META, map_location="cpu", weights_only=True, mmap=True)
        flat = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu" if tensors else "meta")
            for key, entry in index.state_dict_metadata.items()
        }
        if tensors:
            from torch.distributed.checkpoint.state_dict_loader import load

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about a single process
                load(flat, checkpoint_id=folder, no_dist=True)
        model, optimizers = unflatten(flat, checkpoint.pop(GROUPS))
        checkpoint |= {"state_dict": model, "optimizer_states": [number_parameters(each) for each in optimizers]}
    except ConfigError:
        raise
    except Exception as error:  # pickle, torch and damaged entries raise various errors
        raise ConfigError(f"{folder} is not a readable checkpoint ({error!r:.200}); use a different one.") from error
    return checkpoint


def _read_index(folder: Path) -> Any:
    """Read DCP's index, and check that the files which it names are complete."""
    if not (folder / _INDEX).is_file():
        raise ConfigError(f"{folder} is incomplete: it has no {_INDEX}. Use a different checkpoint.")
    with (folder / _INDEX).open("rb") as file:
        index = _Unpickler(file).load()
    for entry in index.storage_data.values():
        name, end = entry.relative_path, entry.offset + entry.length
        if Path(name).name != name or not (folder / name).is_file() or (folder / name).stat().st_size < end:
            raise ConfigError(f"{folder} is incomplete: {name} is missing or too short. Use a different checkpoint.")
    return index


class _Unpickler(pickle.Unpickler):
    """Unpickler for the classes of DCP's index; rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _SAFE.get(module, ()):
            raise ConfigError(f"the checkpoint's index has {module}.{name}; expected tensors. Use a different one.")
        return super().find_class(module, name)
