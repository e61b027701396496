"""Atomic checkpoints, written next to their place and renamed."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import distributed

from lightning_sv.atomic import atomic_path
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoint files atomically: a full disk or a kill leaves the previous."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`; after an OSError, the file there is as before."""
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_path(final) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # torch's zip writer fails at its end too, after a failed write
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError):
                why = (
                    f"could not write {final} ({cause.strerror}); its previous content is unchanged"
                )
                raise OSError(cause.errno, why) from error
            raise

    def load_checkpoint(self, path: Any, *given: Any, **more: Any) -> dict[str, Any]:
        """Read a checkpoint; several ranks map the file, so that a node has it in memory once."""
        if is_sharded(path):
            return read_sharded(path, tensors=True, checksums=False)
        if not distributed.is_initialized():
            return super().load_checkpoint(path, *given, **more)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
