"""Write of a sharded checkpoint while training goes on."""

import errno
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save

from lightning_sv.atomic import partial_of, remove, replace, sync
from lightning_sv.lit.checkpoint.sharded_writer import ChecksummedWriter
from lightning_sv.runs.sharded_checkpoint import GROUPS, META, flat_tensors


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
            replace(partial_of(path), path)  # an old one is of an abandoned branch of this run
            sync(path.parent)


def _system_error(error: CheckpointException) -> tuple[int, str]:
    """Return number and text of the first error of the system that a rank had."""
    for cause, _ in error.failures.values():
        if isinstance(cause, OSError):
            return cause.errno or errno.EIO, str(cause.strerror)
    return errno.EIO, repr(error)
