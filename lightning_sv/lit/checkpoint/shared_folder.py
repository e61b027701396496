"""The folder of sharded checkpoints, which all nodes must share."""

from contextlib import suppress
from pathlib import Path

from lightning.pytorch.strategies import ParallelStrategy

from lightning_sv.atomic import remove
from lightning_sv.errors import ConfigError


def check_shared_folder(strategy: ParallelStrategy, folder: Path) -> None:
    """Check that rank 0 sees links of all ranks in a folder: a collective.

    A checkpoint needs both, and without this check the steps up to the first one would be lost.
    Rank 0 reads and the others write, as in a checkpoint. The other direction could fail on NFS,
    where a node remembers for a while that a file did not exist.

    Raises:
        ConfigError: on every rank, if a node has the folder on its own disk, or if the file system
            has no symbolic links, as that of a mounted bucket or CIFS
    """
    folder = Path(strategy.broadcast(str(folder)))  # rank 0 chooses a run's folder
    folder.mkdir(parents=True, exist_ok=True)
    links = [folder / f".rank-{rank}" for rank in range(strategy.world_size)]
    own_link = links[strategy.global_rank]
    remove(own_link)  # left by a process that was killed
    with suppress(OSError):  # the ranks agree below
        own_link.symlink_to("last.ckpt")

    strategy.barrier()
    is_shared = strategy.broadcast(all(link.is_symlink() for link in links))
    own_link.unlink(missing_ok=True)
    if not is_shared:
        expected = "a folder with symbolic links that all nodes share, as sharded checkpoints need"
        hint = "Or leave out save_distributed_checkpoint."
        raise ConfigError(f"run_dir is {folder.parent}; expected {expected}. {hint}")
