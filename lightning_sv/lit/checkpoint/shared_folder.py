"""The folder of sharded checkpoints, which all nodes must share."""

from contextlib import suppress
from pathlib import Path

from lightning.pytorch.strategies import ParallelStrategy
from torch import distributed

from lightning_sv.atomic import remove
from lightning_sv.errors import ConfigError


def check_shared_folder(strategy: ParallelStrategy, folder: Path) -> None:
    """Check that rank 0 sees links of all ranks in a folder: a collective.

    A checkpoint needs both, and without this check the steps up to the first one would be lost.
    Rank 0 reads and the others write, as in a checkpoint. The other direction could fail on NFS,
    where a node remembers for a while that a file did not exist.

    Raises:
        ConfigError: on every rank, if a node has the folder on its own disk, or if a rank cannot
            create a link, as on a full disk, in a mounted bucket or in CIFS
    """
    folder = Path(strategy.broadcast(str(folder)))  # rank 0 chooses a run's folder
    links = [folder / f".rank-{rank}" for rank in range(strategy.world_size)]
    own_link = links[strategy.global_rank]

    problem = _first_problem(_create_link(own_link))
    has_all_links = problem is None and all(link.is_symlink() for link in links)
    is_shared = strategy.broadcast(has_all_links)  # what rank 0 sees
    with suppress(OSError):  # it may not exist
        own_link.unlink()
    if not is_shared:
        found = f"{folder.parent} ({problem})" if problem else f"{folder.parent}"
        expected = "a folder with symbolic links that all nodes share, as sharded checkpoints need"
        hint = "Or leave out save_distributed_checkpoint."
        raise ConfigError(f"run_dir is {found}; expected {expected}. {hint}")


def _create_link(link: Path) -> str | None:
    """Create a link; return the error of the system in words, or None."""
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        remove(link)  # left by a process that was killed
        link.symlink_to("last.ckpt")
    except OSError as error:
        return error.strerror or repr(error)
    return None


def _first_problem(own: str | None) -> str | None:
    """Return the first problem of all ranks, or None: a collective."""
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, own)
    return next(filter(None, problems), None)
