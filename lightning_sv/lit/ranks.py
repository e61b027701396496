"""This process among the others of a run."""

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import distributed


def rank() -> int:
    """Rank of this process; what the environment says until there is a trainer."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def take_rank(trainer: L.Trainer) -> None:
    """Take the trainer's rank: Lightning's is that of RANK or SLURM_PROCID, also for one process, a run of its own."""
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]


def leave_group() -> None:
    """At exit: Lightning does so for NCCL alone, and the threads of gloo can abort an exit that leaves them behind."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
