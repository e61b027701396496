"""Write of a sharded checkpoint while training goes on, with a checksum per file."""

import errno
import json
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from lightning_sv.atomic import file_sha256, partial_of, remove, replace, sync
from lightning_sv.runs.sharded_checkpoint import CHECKSUMS, GROUPS, INDEX, META, flat_tensors


class BackgroundWrite:
    """Copy the shards to host memory, write them in a thread, and name the folder when it is whole.

    Lightning's own write blocks the training, has no checksums, and leaves an incomplete folder
    under the checkpoint's name if a process is killed.

    Attributes:
        path: folder that is being written; None if there is none
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._future: Future[Any] | None = None
        self._group: distributed.ProcessGroup | None = None

    def start(self, strategy: Strategy, checkpoint: dict[str, Any], path: Path) -> None:
        """Start to write the shards of this rank, and on rank 0 everything but the tensors."""
        partial = partial_of(path)
        optimizers = checkpoint.pop("optimizer_states", [])
        tensors = flat_tensors(checkpoint.pop("state_dict"), optimizers)
        if strategy.is_global_zero:
            remove(partial)  # left by a process that was killed
            partial.mkdir(parents=True)
            groups = [optimizer["param_groups"] for optimizer in optimizers]
            torch.save(checkpoint | {GROUPS: groups}, partial / META)
            sync(partial / META)
        strategy.barrier()
        if self._group is None:  # of the writing thread: NCCL cannot send host memory
            self._group = distributed.new_group(backend="gloo")
        writer = ChecksummedWriter(partial)
        future: Any = async_save(tensors, storage_writer=writer, process_group=self._group)
        self._future = future
        self.path = path

    def finish(self, *, is_first: bool, wait: bool) -> None:
        """Give the folder its name, once all ranks have written.

        Args:
            is_first: if True, this rank renames it
            wait: if False, return if they have not written by now

        Raises:
            OSError: a rank could not write; earlier checkpoints are unchanged
        """
        path = self.path
        future = self._future
        if path is None or future is None:
            return
        if not wait and not future.done():
            return
        self.path = None
        self._future = None
        try:
            future.result()
        except CheckpointException as error:
            code, reason = _system_error(error)
            found = f"could not write {path} ({reason})"
            raise OSError(code, f"{found}; earlier checkpoints are unchanged") from error
        if is_first:
            replace(partial_of(path), path)  # an old one is of an abandoned start of this run
            sync(path.parent)


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
        """Write the index and the checksums, on the first rank."""
        super().finish(metadata, results)
        folder = Path(self.path)
        digests = {name: file_sha256(folder / name) for name in (META, INDEX)}
        for of_rank in results:
            for result in of_rank:
                assert isinstance(result, ChecksummedResult)
                digests[result.storage_data.relative_path] = result.sha256
        with (folder / CHECKSUMS).open("w", encoding="utf-8") as file:
            json.dump(digests, file, indent=2, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)


def _with_checksum(result: WriteResult, digests: dict[str, str]) -> ChecksummedResult:
    digest = digests[result.storage_data.relative_path]
    return ChecksummedResult(result.index, result.size_in_bytes, result.storage_data, digest)
