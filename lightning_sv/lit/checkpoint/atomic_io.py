"""Atomic checkpoints, written next to their place and renamed."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import distributed

from lightning_sv.atomic import partial_of, remove, replace, sync
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoint files atomically: a full disk or a kill leaves the previous."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`; after an OSError, its content is as before.

        That may be a folder with a sharded checkpoint.

        Raises:
            OSError: the file cannot be written
        """
        final = Path(path)
        partial = partial_of(final)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)  # left by a process that was killed: a folder if it wrote shards
            write_content(checkpoint, partial)
            sync(partial)
            replace(partial, final)
        except OSError as error:
            why = f"could not write {final} ({error.strerror}); its previous content is unchanged"
            raise OSError(error.errno, why) from error
        finally:
            remove(partial)

    def load_checkpoint(self, path: Any, *given: Any, **more: Any) -> dict[str, Any]:
        """Read a checkpoint; several ranks map the file, so that a node has it in memory once."""
        if is_sharded(path):
            return read_sharded(path, tensors=True, checksums=False)
        if not distributed.is_initialized():
            return super().load_checkpoint(path, *given, **more)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def write_content(content: dict[str, Any], path: Path) -> None:
    """Write a file with `torch.save`.

    Raises:
        OSError: the file cannot be written. Then torch's zip writer fails once more when it ends,
            with a RuntimeError that hides the reason
        RuntimeError: torch fails for a different reason
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        cause = error.__context__
        if isinstance(cause, OSError):
            raise cause from None
        raise
