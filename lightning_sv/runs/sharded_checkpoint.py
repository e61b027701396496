"""Sharded checkpoints: a folder of `torch.distributed.checkpoint` (DCP) with one file per rank.

    meta.pt          Lightning's checkpoint without the tensors
    .metadata        DCP's index: key of a tensor -> file, offset and length of its shards
    *.distcp         the tensors
    checksums.json   sha256 of each other file

Keys of the tensors: `model/NAME`, and `optimizer/INDEX/NAME/KEY` for an optimizer's state.
`checksums.json` is written last, after all ranks have finished, so a folder without it is
incomplete.
"""

import pickle
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from lightning_sv.atomic import check_readable, file_sha256, read_json, reading
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
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "torch": {
        "Size",
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
}


def unusable(path: str | Path, found: str) -> str:
    """Return the message for a checkpoint that is damaged, incomplete, or of something else."""
    return f"{path} {found}; use a different checkpoint."


def is_sharded(path: str | Path) -> bool:
    """Return whether a path is a sharded checkpoint, complete or not."""
    return (Path(path) / META).is_file()


def flat_tensors(model: dict[str, Any], optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all tensors under the keys of a sharded checkpoint.

    `optimizers` are state dicts with parameter names, as `get_optimizer_state_dict` returns them.
    """
    tensors = {f"model/{name}": value for name, value in model.items()}
    for index, optimizer in enumerate(optimizers):
        for name, state in optimizer["state"].items():
            for key, value in state.items():
                tensors[f"optimizer/{index}/{name}/{key}"] = value
    return tensors


def unflatten(
    tensors: dict[str, Any], groups: list[list[dict[str, Any]]]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the state dicts of the model and of the optimizers, the inverse of `flat_tensors`."""
    model: dict[str, Any] = {}
    optimizers: list[Any] = [{"state": {}, "param_groups": each} for each in groups]
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "model":
            model[name] = value
        else:
            index, name, entry = name.split("/")
            states = optimizers[int(index)]["state"]
            states.setdefault(name, {})[entry] = value
    return model, optimizers


def number_parameters(named: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with numbers for parameter names.

    They count in the order of its groups, as torch's own.
    """
    number: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        numbers = []
        for name in group["params"]:
            number[name] = len(number)
            numbers.append(number[name])
        groups.append(group | {"params": numbers})
    states = {number[name]: state for name, state in named["state"].items()}
    return {"state": states, "param_groups": groups}


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
    check_readable(folder / META)
    try:
        return _read_content(folder, names, tensors=tensors)
    except ConfigError:
        raise
    except Exception as error:  # pickle, torch and damaged entries raise various errors
        raise ConfigError(
            unusable(folder, f"is not a readable checkpoint ({error!r:.200})")
        ) from error


def as_file(source: Any) -> Any:
    """Return the folder of a sharded checkpoint as a file in memory; anything else as it is.

    Lightning's `load_from_checkpoint` reads a path or an open file, but no dictionary.
    """
    if not isinstance(source, str | Path) or not is_sharded(source):
        return source
    file = BytesIO()
    torch.save(read_sharded(source, tensors=True, checksums=True), file)
    file.seek(0)
    return file


def _read_content(folder: Path, names: set[str], *, tensors: bool) -> dict[str, Any]:
    index = _read_index(folder, names)
    meta = folder / META
    checkpoint: dict[str, Any] = torch.load(meta, map_location="cpu", weights_only=True, mmap=True)

    device = "cpu" if tensors else "meta"
    flat = {}
    for key, entry in index.state_dict_metadata.items():
        flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    if tensors:
        _load_tensors(flat, folder)

    groups = checkpoint.pop(GROUPS)
    model, optimizers = unflatten(flat, groups)
    checkpoint["state_dict"] = model
    if groups:  # a checkpoint of weights alone has none
        checkpoint["optimizer_states"] = [number_parameters(each) for each in optimizers]
    return checkpoint


def _load_tensors(flat: dict[str, Any], folder: Path) -> None:
    """Fill the tensors with the content of the files."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a single process
        load(flat, checkpoint_id=folder, no_dist=True)


def _check_files(folder: Path, *, checksums: bool) -> set[str]:
    """Check that a folder has the files that its list names, and no links; return their names."""
    _check_no_links(folder)
    if not (folder / CHECKSUMS).is_file():
        raise ConfigError(unusable(folder, f"is incomplete: it has no {CHECKSUMS}"))
    digests = read_json(folder / CHECKSUMS, "use a different checkpoint.")
    present = {path.name for path in folder.iterdir() if path.is_file()}
    missing = ({META, INDEX} - digests.keys()) | (digests.keys() - present)
    if missing:
        raise ConfigError(unusable(folder, f"is incomplete: {min(missing)} is missing"))
    if checksums:
        for name, digest in digests.items():
            _check_digest(folder / name, digest)
    return set(digests)


def _check_no_links(folder: Path) -> None:
    with reading(folder):
        paths = list(folder.iterdir())
    for path in (folder / CHECKSUMS, *paths):
        if path.is_symlink():  # the content could change later, and come from anywhere
            hint = "Copy the file, or link the folder."
            raise ConfigError(f"{path} is a link; expected a file. {hint}")


def _check_digest(path: Path, digest: str) -> None:
    with reading(path):
        is_altered = file_sha256(path) != digest
    if is_altered:
        raise ConfigError(unusable(path.parent, f"is damaged: {path.name} was altered"))


def _read_index(folder: Path, names: set[str]) -> Any:
    """Read DCP's index, and check that its entries are inside the listed files."""
    with reading(folder), (folder / INDEX).open("rb") as file:
        index = _Unpickler(file).load()
    for entry in index.storage_data.values():
        name = entry.relative_path
        end = entry.offset + entry.length
        if name not in names or (folder / name).stat().st_size < end:
            raise ConfigError(unusable(folder, f"is incomplete: {name} is missing or too short"))
    return index


class _Unpickler(pickle.Unpickler):
    """Unpickler for the classes of DCP's index; rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _SAFE.get(module, ()):
            found = f"the checkpoint's index has {module}.{name}"
            raise ConfigError(f"{found}; expected tensors. Use a different one.")
        return super().find_class(module, name)
