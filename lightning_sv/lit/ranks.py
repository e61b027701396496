"""This process among the others of a run."""

import os

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import distributed


def rank() -> int:
    """Rank of this process, before anything is connected."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def is_first_of_node() -> bool:
    """Whether this process reads the shards for all of its node."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))) == 0


def leave_group() -> None:
    """At exit: Lightning does so for NCCL alone, and the threads of gloo can abort an exit that leaves them behind."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
