"""Atomic write of a sharded checkpoint, with a checksum per file."""

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from lightning_sv.atomic import file_sha256, partial_of, remove, replace, sync
from lightning_sv.errors import ConfigError
from lightning_sv.runs.sharded_checkpoint import CHECKSUMS, GROUPS, INDEX, META, flat_tensors


def write_sharded(strategy: Strategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Write the shards of all ranks; a collective. The folder gets its name when it is complete.

    Lightning's own write has no checksums, and leaves an incomplete folder under the checkpoint's
    name if a process is killed.

    Raises:
        OSError: a rank could not write; earlier checkpoints are unchanged
    """
    partial = partial_of(path)
    optimizers = checkpoint.pop("optimizer_states", [])
    tensors = flat_tensors(checkpoint.pop("state_dict"), optimizers)
    if strategy.is_global_zero:
        groups = [optimizer["param_groups"] for optimizer in optimizers]
        _write_meta(checkpoint | {GROUPS: groups}, partial)
    strategy.barrier()
    try:
        save(tensors, storage_writer=ChecksummedWriter(partial))
    except CheckpointException as error:
        code, reason = _system_error(error)
        found = f"could not write {path} ({reason})"
        raise OSError(code, f"{found}; earlier checkpoints are unchanged") from error
    if strategy.is_global_zero:
        replace(partial, path)  # an old one is of an abandoned start of this run
        sync(path.parent)


def _write_meta(meta: dict[str, Any], folder: Path) -> None:
    """Write everything but the tensors into a new folder."""
    remove(folder)  # left by a process that was killed
    folder.mkdir(parents=True)
    torch.save(meta, folder / META)
    sync(folder / META)


def check_links(folder: Path) -> None:
    """Check that a new link can be made in a folder, before the first checkpoint needs one.

    Raises:
        ConfigError: the file system has no symbolic links, as that of a mounted bucket or CIFS
    """
    link = folder / ".link"
    remove(link)  # left by a process that was killed
    folder.mkdir(parents=True, exist_ok=True)
    try:
        link.symlink_to("last.ckpt")
    except OSError as error:
        expected = "a folder on a file system with symbolic links"
        raise ConfigError(_unfit(folder, expected)) from error
    link.unlink()


def check_shared(strategy: ParallelStrategy, folder: Path) -> None:
    """Check that rank 0 sees the files of all ranks, before the first checkpoint: a collective.

    Rank 0 reads and the others write, as in a checkpoint. The other direction could fail on NFS,
    where a node remembers for a while that a file did not exist.

    Raises:
        ConfigError: on every rank, if a node has the folder on its own disk
    """
    folder = Path(strategy.broadcast(str(folder)))  # rank 0 chooses a run's folder
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f".rank-{rank}" for rank in range(strategy.world_size)]
    own_file = files[strategy.global_rank]
    own_file.touch()
    strategy.barrier()
    is_shared = strategy.broadcast(all(file.exists() for file in files))
    own_file.unlink()
    if not is_shared:
        why = "because each rank writes its shard there"
        raise ConfigError(_unfit(folder, f"a folder that all nodes share, {why}"))


def _unfit(folder: Path, expected: str) -> str:
    hint = "Or leave out save_distributed_checkpoint."
    return f"run_dir is {folder.parent}; expected {expected}. {hint}"


def link_last(last: Path, folder: Path) -> None:
    """Link `last` to a complete sharded checkpoint next to it, and then remove the previous one.

    At any moment `last` names a complete checkpoint; otherwise `--ckpt_path last` would start a new
    run.
    """
    previous = last.resolve()
    written = folder.resolve()
    link = partial_of(last)
    remove(link)  # left by a process that was killed
    link.symlink_to(folder.name)
    replace(link, last)  # in a copy of a run, `last` may be a folder
    is_beside = previous.parent == written.parent and previous.name != last.name
    if is_beside and previous != written:
        remove(previous)


def _system_error(error: CheckpointException) -> tuple[int, str]:
    """Return number and text of the first error of the system that a rank had."""
    for cause, _ in error.failures.values():
        if isinstance(cause, OSError):
            return cause.errno or errno.EIO, str(cause.strerror)
    return errno.EIO, repr(error)


@dataclass(frozen=True)
class ChecksummedResult(WriteResult):
    """DCP's description of a written tensor, with the sha256 of its file."""

    sha256: str


class ChecksummedWriter(FileSystemWriter):
    """Write a sharded checkpoint, and after every rank has finished, its checksums.

    Each rank hashes its own file right after writing it, while it is in the page cache.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the shards of this rank; the results go to the first rank."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        digests = {name: file_sha256(Path(self.path) / name) for name in names}
        checked = TorchFuture[list[WriteResult]]()
        checked.set_result([_with_checksum(result, digests) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the checksums, on the first rank.

        Raises:
            OSError: a shard is missing, because a node wrote it to its own disk
        """
        super().finish(metadata, results)
        folder = Path(self.path)
        digests = {name: file_sha256(folder / name) for name in (META, INDEX)}
        for of_rank in results:
            for result in of_rank:
                assert isinstance(result, ChecksummedResult)
                digests[result.storage_data.relative_path] = result.sha256
        _check_present(folder, digests)
        with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
            json.dump(digests, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)


def _check_present(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if not (folder / name).is_file():
            reason = f"{name} is missing; all nodes must share the folder"
            raise FileNotFoundError(errno.ENOENT, reason)


def _with_checksum(result: WriteResult, digests: dict[str, str]) -> ChecksummedResult:
    digest = digests[result.storage_data.relative_path]
    return ChecksummedResult(result.index, result.size_in_bytes, result.storage_data, digest)
