"""The processes of a run: they start and end together."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from functools import partial

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import distributed

from lightning_sv.errors import ConfigError, StoppedError
from lightning_sv.lit.fsdp import check_strategy

_PR_SET_PDEATHSIG = 1
#: whether this process has failed and others may be waiting for it in a collective
_failed = False


def join_ranks(trainer: L.Trainer) -> "partial[None]":
    """Take the trainer's rank, and return an exit handler.

    The process exits with its parent. Lightning reads RANK or SLURM_PROCID even if the run has a
    single process.
    """
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]
    _check_processes(trainer)
    check_strategy(trainer.strategy)
    if is_child(trainer):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return partial(_leave, trainer)


def is_child(trainer: L.Trainer) -> bool:
    """Return True if Lightning's own launcher started this process, from the node's first one."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def _check_processes(trainer: L.Trainer) -> None:
    """Check that the launcher has started one process per device, each of which runs the command.

    WORLD_SIZE is set by torchrun and by operators such as PyTorchJob. With one device Lightning
    does not read it, and the processes would be equal runs in one directory. The tasks of srun,
    which may be runs of their own, have none.

    Raises:
        ConfigError: trainer.strategy forks processes, or trainer.devices is not their number
    """
    strategy = trainer.strategy
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        name = getattr(strategy, "strategy_name", "ddp_spawn")
        expected = "auto, ddp or FullyShardedStrategy, whose processes run the command."
        raise ConfigError(f"trainer.strategy is {name}; expected {expected}")
    devices = trainer.num_devices
    nodes = trainer.num_nodes
    launched = os.environ.get("WORLD_SIZE", "")
    started = int(launched) if launched.isdigit() else trainer.world_size
    if trainer.world_size == started == devices * nodes:
        return
    programs = f"srun --ntasks-per-node={devices} (SLURM) or torchrun --nproc-per-node={devices}"
    raise ConfigError(
        f"trainer.devices x trainer.num_nodes is {devices} x {nodes}; expected {started}, the "
        "processes that were started. Set --trainer.devices, or start one process per device: "
        f"{programs}."
    )


def _leave(
    trainer: L.Trainer, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Kill the ranks that this process started if it failed; they may wait in a collective."""
    global _failed
    is_failure = error is not None and not isinstance(error, StoppedError)
    _failed = is_failure and trainer.world_size > 1
    launcher = trainer.strategy.launcher
    if _failed and launcher is not None:
        launcher.kill(signal.SIGKILL)


def end_at_once(code: int) -> None:
    """Exit without `atexit` handlers if this rank failed: NCCL's would wait in a collective."""
    if not _failed:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it may be missing or closed
            stream.flush()
    os._exit(code)


def leave_group() -> None:
    """Destroy the process group at exit.

    Lightning does so for NCCL only, and gloo's threads can abort the exit.
    """
    end_at_once(1)  # after a traceback in a script of a user
    if distributed.is_initialized():
        distributed.destroy_process_group()
