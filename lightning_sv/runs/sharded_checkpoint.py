"""Sharded checkpoints: a folder of `torch.distributed.checkpoint` (DCP) with one file per rank.

Keys of the tensors: `model/NAME`, and `optimizer/INDEX/NAME/KEY` for an optimizer's state. `meta.pt` has the rest of
Lightning's checkpoint. `checksums.json` has the sha256 of each other file. It is written last, after all ranks have
finished, so a folder without it is incomplete.
"""

import pickle
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_sv.atomic import file_sha256, read_json, reading
from lightning_sv.errors import ConfigError

#: file with everything but the tensors; Lightning's name
META = "meta.pt"
#: entry of META: names, values and parameter names of each optimizer's groups
GROUPS = "optimizer_groups"
#: DCP's index of the tensors
INDEX = ".metadata"
#: sha256 of each other file
CHECKSUMS = "checksums.json"
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


def read_sharded(path: str | Path, *, tensors: bool, checksums: bool) -> dict[str, Any]:
    """Read a sharded checkpoint in one process, as a file's dictionary.

    Args:
        path: the folder
        tensors: if True, read the tensors; if False, they are on meta
        checksums: if True, compare the checksum of every file, which reads all of them

    Raises:
        ConfigError: the folder is incomplete or damaged, or contains a link
    """
    folder = Path(path)
    names = _check_files(folder, checksums=checksums)
    with reading(folder), (folder / META).open("rb") as file:
        file.read(1)  # torch reports a file that it cannot open as damaged
    try:
        index = _read_index(folder, names)
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


def _check_files(folder: Path, *, checksums: bool) -> set[str]:
    """Check that a folder has the files that its list names, and no links; return their names."""
    with reading(folder):
        paths = list(folder.iterdir())
    for path in (folder / CHECKSUMS, *paths):
        if path.is_symlink():  # the content could change later, and come from anywhere
            raise ConfigError(f"{path} is a link; expected a file. Copy the file, or link the folder.")
    if not (folder / CHECKSUMS).is_file():
        raise ConfigError(f"{folder} is incomplete: it has no {CHECKSUMS}. Use a different checkpoint.")
    digests = read_json(folder / CHECKSUMS, "use a different checkpoint.")
    for name in dict.fromkeys((META, INDEX, *digests)):
        path = folder / name
        if path.parent != folder or not path.is_file() or name not in digests:
            raise ConfigError(f"{folder} is incomplete: {name} is missing. Use a different checkpoint.")
        with reading(path):
            altered = checksums and file_sha256(path) != digests[name]
        if altered:
            raise ConfigError(f"{folder} is damaged: {name} was altered. Use a different checkpoint.")
    return set(digests)


def _read_index(folder: Path, names: set[str]) -> Any:
    """Read DCP's index, and check that its entries are inside the listed files."""
    with reading(folder), (folder / INDEX).open("rb") as file:
        index = _Unpickler(file).load()
    for entry in index.storage_data.values():
        name = entry.relative_path
        if name not in names or (folder / name).stat().st_size < entry.offset + entry.length:
            raise ConfigError(f"{folder} is incomplete: {name} is missing or too short. Use a different checkpoint.")
    return index


class _Unpickler(pickle.Unpickler):
    """Unpickler for the classes of DCP's index; rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _SAFE.get(module, ()):
            raise ConfigError(f"the checkpoint's index has {module}.{name}; expected tensors. Use a different one.")
        return super().find_class(module, name)
