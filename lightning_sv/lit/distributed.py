"""Start and end the processes of a run together."""

import ctypes
import os
import signal
import sys
from datetime import timedelta
from functools import partial

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import distributed
from torch.distributed.constants import default_pg_timeout

from lightning_sv.errors import ConfigError, StoppedError
from lightning_sv.lit.fsdp import FullyShardedStrategy

#: timeout of a collective; Lightning's 30 minutes cost many GPU-hours
_TIMEOUT = timedelta(minutes=10)
_PR_SET_PDEATHSIG = 1
#: whether this process has failed and others may be waiting for it in a collective
_failed = False


def rank() -> int:
    """Return the rank of this process, from the environment until there is a trainer."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def join_ranks(trainer: L.Trainer) -> "partial[None]":
    """Take the trainer's rank, exit with the parent process, limit the time of collectives; return an exit handler.

    Lightning reads RANK or SLURM_PROCID even if the run has a single process.

    Raises:
        ConfigError: the number of processes differs from the number of devices, or replicas do not divide it
    """
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if trainer.world_size != devices * nodes:
        raise ConfigError(
            f"trainer.devices x trainer.num_nodes is {devices} x {nodes}; expected {trainer.world_size}, the processes "
            f"that were started. Start one per device: srun --ntasks-per-node={devices} (under SLURM), or torchrun "
            f"--nproc-per-node={devices}."
        )
    strategy: object = trainer.strategy
    if isinstance(strategy, FullyShardedStrategy):
        strategy.check_replicas()
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = _TIMEOUT  # type: ignore[attr-defined]
    started_by_rank_0 = isinstance(getattr(strategy, "cluster_environment", None), LightningEnvironment)
    if started_by_rank_0 and trainer.local_rank and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return partial(_leave, trainer)


def _leave(trainer: L.Trainer, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """Kill the ranks that this process started if it failed, because they may wait in a collective."""
    global _failed
    _failed = error is not None and not isinstance(error, StoppedError) and trainer.world_size > 1
    if _failed and (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signal.SIGKILL)


def check_same_start(start: tuple[str | None, int]) -> None:
    """Check that all ranks start from the same checkpoint and step: a collective.

    Raises:
        ConfigError: they differ, e.g. because a node's file system does not show the checkpoint yet
    """
    if not distributed.is_initialized():
        return
    starts: list[tuple[str | None, int]] = [start] * distributed.get_world_size()
    distributed.all_gather_object(starts, start)
    for number, other in enumerate(starts):
        if other != starts[0]:
            first, wrong = (f"{path} at step {step}" if path else "none" for path, step in (starts[0], other))
            raise ConfigError(
                f"ckpt_path is {wrong} on rank {number}; expected {first}, as on rank 0. Start again when every node "
                "reads the same checkpoint."
            )


def end_at_once(code: int) -> None:
    """Exit without `atexit` handlers if this rank failed, because NCCL destroys its group by a collective."""
    if _failed:
        os._exit(code)


def leave_group() -> None:
    """Destroy the process group at exit; Lightning does so for NCCL only, and gloo's threads can abort the exit."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
