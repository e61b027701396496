"""Atomic write of a sharded checkpoint, with a checksum per file."""

import errno
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_sv.atomic import file_sha256, partial_of, remove, replace, sync
from lightning_sv.lit.checkpoint.atomic_io import write_content
from lightning_sv.runs.sharded_checkpoint import CHECKSUMS, GROUPS, INDEX, META, flat_tensors


def write_sharded(strategy: Strategy, checkpoint: dict[str, Any], path: Path) -> None:
    """Write the shards of all ranks; a collective. The folder gets its name when it is complete.

    Lightning's own write has no checksums, and leaves an incomplete folder under the checkpoint's
    name if a process is killed.

    Raises:
        OSError: on every rank, if one could not write or read back its files, or if a node wrote
            to a disk of its own; earlier checkpoints are unchanged
    """
    folder = partial_of(path)
    optimizers = checkpoint.pop("optimizer_states", [])
    tensors = flat_tensors(checkpoint.pop("state_dict"), optimizers)
    groups = [optimizer["param_groups"] for optimizer in optimizers]
    meta = checkpoint | {GROUPS: groups}
    try:
        _on_first_rank(strategy, partial(_write_meta, meta, folder))
        save(tensors, storage_writer=FileSystemWriter(folder))
        digests = _digests_of_all_ranks(folder)
        _on_first_rank(strategy, partial(_complete, folder, path, digests))
    except (CheckpointException, OSError) as error:
        if strategy.is_global_zero:
            remove(folder)
        code, reason = _system_error(error)
        found = f"could not write {path} ({reason})"
        raise OSError(code, f"{found}; earlier checkpoints are unchanged") from error


def _on_first_rank(strategy: Strategy, write: Callable[[], None]) -> None:
    """Write on rank 0; a collective.

    Raises:
        OSError: on every rank, if rank 0 could not; otherwise the others would wait for it in
            their next collective
    """
    failure: OSError | None = None
    if strategy.is_global_zero:
        try:
            write()
        except OSError as error:
            failure = error
    failure = strategy.broadcast(failure)
    if failure is not None:
        raise failure


def _write_meta(meta: dict[str, Any], folder: Path) -> None:
    """Write everything but the tensors into a new folder."""
    remove(folder)  # left by a process that was killed
    folder.mkdir(parents=True)
    write_content(meta, folder / META)
    sync(folder / META)


def _digests_of_all_ranks(folder: Path) -> dict[str, str]:
    """Return name -> sha256 of the files of all ranks; a collective.

    Raises:
        OSError: on every rank, if one could not read back its files
    """
    if not distributed.is_initialized():
        return _digests_of_rank(folder, 0)
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, _digests_or_error(folder, distributed.get_rank()))
    digests: dict[str, str] = {}
    for digests_of_rank in ranks:
        if isinstance(digests_of_rank, OSError):
            raise digests_of_rank
        digests |= digests_of_rank
    return digests


def _digests_or_error(folder: Path, rank: int) -> dict[str, str] | OSError:
    """Return the digests of this rank, or its error, which the other ranks must learn.

    If it were raised here, they would wait for this rank until the time limit.
    """
    try:
        return _digests_of_rank(folder, rank)
    except OSError as error:
        return error


def _digests_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """Return name -> sha256 of the files that this rank has just written, from its page cache.

    DCP names them `__RANK_NUMBER.distcp`; the first rank also wrote META and the index.
    """
    names = [path.name for path in folder.glob(f"__{rank}_*")]
    if rank == 0:
        names += [META, INDEX]
    return {name: file_sha256(folder / name) for name in names}


def _complete(folder: Path, path: Path, digests: dict[str, str]) -> None:
    """Write the checksums of a folder, and give it its name."""
    _write_checksums(folder, digests)
    replace(folder, path)  # an old one is of an abandoned start of this run
    sync(path.parent)


def _write_checksums(folder: Path, digests: dict[str, str]) -> None:
    """Write the checksums of a folder, which completes it.

    The folder may have further files, such as those that NFS keeps for a process that reads them.

    Raises:
        FileNotFoundError: the folder lacks a file, because a node wrote to a disk of its own
    """
    present = {path.name for path in folder.iterdir()}
    missing = digests.keys() - present
    if missing:
        reason = f"{min(missing)} is missing; all nodes must share the folder"
        raise FileNotFoundError(errno.ENOENT, reason)
    path = folder / CHECKSUMS
    path.write_text(json.dumps(digests, indent=2, sort_keys=True), encoding="utf-8")
    sync(path)
    sync(folder)


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


def _system_error(error: CheckpointException | OSError) -> tuple[int, str]:
    """Return number and text of the first error of the system that a rank had."""
    causes: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError):
            return cause.errno or errno.EIO, str(cause.strerror)
    return errno.EIO, repr(error)
