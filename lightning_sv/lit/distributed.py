"""The processes of a run: they start and end together, and a signal, also Ctrl-C, stops them after a step."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import distributed
from torch.distributed.constants import default_pg_timeout

from lightning_sv.errors import ConfigError, StoppedError
from lightning_sv.lit.checkpoint.compat import first_difference
from lightning_sv.lit.fsdp import FullyShardedStrategy, check_strategy

log = logging.getLogger(__name__)

#: timeout of a collective; Lightning's 30 minutes cost many GPU-hours
_TIMEOUT = timedelta(minutes=10)
_PR_SET_PDEATHSIG = 1
#: environment variable: also requeue the SLURM job on SIGTERM, which `scancel` sends too
REQUEUE_ON_SIGTERM = "LIGHTNING_SV_REQUEUE_ON_SIGTERM"
#: exit codes after SIGTERM, Ctrl-C, and the end of the terminal
STOPPED, INTERRUPTED, HUNG_UP = (128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
#: signals that schedulers such as SLURM, submitit, SGE and OAR send before the end of a job's time
_ANNOUNCING = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU})
_SIGNALS = _ANNOUNCING | {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
#: signals that shells ignore for background jobs, and nohup
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_SAID = b"\nstopping after this step, with a checkpoint; Ctrl-C again ends the run at once, without one\n"
_SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it
_SAME = "Start all ranks with the same settings, corpus, checkpoint and software."
#: whether this process has failed and others may be waiting for it in a collective
_failed = False


def join_ranks(trainer: L.Trainer) -> "partial[None]":
    """Take the trainer's rank, exit with the parent process, limit the time of collectives; return an exit handler.

    Lightning reads RANK or SLURM_PROCID even if the run has a single process.
    """
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]
    _check_processes(trainer)
    strategy: object = trainer.strategy
    check_strategy(strategy)
    if isinstance(strategy, FullyShardedStrategy):
        strategy.check_replicas()
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = _TIMEOUT  # type: ignore[attr-defined]
    started_by_rank_0 = isinstance(getattr(strategy, "cluster_environment", None), LightningEnvironment)
    if started_by_rank_0 and trainer.local_rank:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return partial(_leave, trainer)


def _check_processes(trainer: L.Trainer) -> None:
    """Check that the launcher has started one process per device, and that each of them runs the command.

    WORLD_SIZE is set by torchrun and by operators such as PyTorchJob. With one device Lightning does not read it, and
    the processes would be equal runs in one directory. The tasks of srun, which may be runs of their own, have none.

    Raises:
        ConfigError: trainer.strategy forks processes, or trainer.devices is not their number
    """
    strategy = trainer.strategy
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        expected = "auto, ddp or FullyShardedStrategy, whose processes run the command."
        raise ConfigError(f"trainer.strategy is {getattr(strategy, 'strategy_name', 'ddp_spawn')}; expected {expected}")
    devices = trainer.num_devices
    nodes = trainer.num_nodes
    launched = os.environ.get("WORLD_SIZE", "")
    started = int(launched) if launched.isdigit() else trainer.world_size
    if trainer.world_size == started == devices * nodes:
        return
    programs = f"srun --ntasks-per-node={devices} (under SLURM), or torchrun --nproc-per-node={devices}"
    raise ConfigError(
        f"trainer.devices x trainer.num_nodes is {devices} x {nodes}; expected {started}, the processes that were "
        f"started. Set --trainer.devices, or start one process per device: {programs}."
    )


def _leave(trainer: L.Trainer, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """Kill the ranks that this process started if it failed, because they may wait in a collective."""
    global _failed
    _failed = error is not None and not isinstance(error, StoppedError) and trainer.world_size > 1
    if _failed and (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signal.SIGKILL)


def check_same_on_all_ranks(here: dict[str, Any]) -> None:
    """Check that all ranks have the same settings, data and versions, before the first of them steps: a collective.

    DDP averages gradients only, so copies of the model with different settings would drift apart unnoticed.

    Args:
        here: name -> plain value of this rank, which may be nested dictionaries

    Raises:
        ConfigError: on every rank, with the first name that differs, and the values of rank 0 and of the other rank
    """
    if not distributed.is_initialized():
        return
    ranks: list[dict[str, Any]] = [here] * distributed.get_world_size()
    distributed.all_gather_object(ranks, here)
    for rank, other in enumerate(ranks):
        for name in ranks[0] | other:
            key, first, value = first_difference(name, ranks[0].get(name), other.get(name))
            if value != first:
                raise ConfigError(f"{key} is {value} on rank {rank}; expected {first}, as on rank 0. {_SAME}")


def end_at_once(code: int) -> None:
    """Exit without `atexit` handlers if this rank failed, because NCCL destroys its group by a collective."""
    if _failed:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # it may be missing or closed
                stream.flush()
        os._exit(code)


def leave_group() -> None:
    """Destroy the process group at exit; Lightning does so for NCCL only, and gloo's threads can abort the exit."""
    end_at_once(1)  # after a traceback in a script of a user
    if distributed.is_initialized():
        distributed.destroy_process_group()


def exit_code(stopped: StoppedError) -> int:
    """Return the exit code of a stopped run; requeue its SLURM job first if requested."""
    rank = getattr(rank_zero_only, "rank", 0)
    return 0 if stopped.requeue and (rank or requeue()) else stopped.code


class StopSignals:
    """Record signals from before the run's setup until its summary; Lightning's handlers would stop within a step."""

    def __init__(self) -> None:
        self._speaks = False
        #: last signal that asked this process to stop
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        #: signals after which the SLURM job is queued again
        self._requeueing = set[int](_ANNOUNCING)

    def is_received(self) -> bool:
        """Return True if a signal asked this process to stop."""
        return self.received is not None

    def listen(self, trainer: L.Trainer) -> None:
        """Install the handlers before the trainer does; Python allows that in the main thread only."""
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        # Lightning would synchronize its own handlers' state between devices before every micro-batch.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        self._speaks = trainer.is_global_zero
        self._follow(trainer._accelerator_connector.cluster_environment)
        for number in _SIGNALS | self._requeueing:
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def _follow(self, environment: ClusterEnvironment) -> None:
        """Set the signals that requeue the job to those of the Trainer's plugin, if there is one."""
        if isinstance(environment, SLURMEnvironment):
            chosen = environment.requeue_signal
            if chosen not in (None, signal.SIGUSR1):  # SIGUSR1 is Lightning's default
                self._requeueing = {int(chosen)}
            if not environment.auto_requeue:
                self._requeueing.clear()
                return
        if os.environ.get(REQUEUE_ON_SIGTERM):
            self._requeueing.add(signal.SIGTERM)

    def leave(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the default handler also ends code that hangs outside Python
            if self._speaks:
                os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + _SAID)  # print is not reentrant

    def stop(self, trainer: L.Trainer) -> None:
        """Stop the run after the last step, whose checkpoint is written: a collective.

        Raises:
            StoppedError: always; with requeue if any device received a signal that requeues the SLURM job
        """
        announced = self.received in self._requeueing
        interrupted = self.received == signal.SIGINT
        hung_up = self.received == signal.SIGHUP
        if trainer.world_size > 1:  # processes receive the signal at different times
            decide = trainer.strategy.reduce_boolean_decision
            announced = decide(announced, all=False)
            interrupted = decide(interrupted, all=False)
            hung_up = decide(hung_up, all=False)
        requeues = announced and not interrupted and "SLURM_JOB_ID" in os.environ
        raise StoppedError(trainer.global_step, _code(interrupted, hung_up), requeues)


def _code(interrupted: bool, hung_up: bool) -> int:
    if interrupted:
        return INTERRUPTED
    return HUNG_UP if hung_up else STOPPED


def requeue() -> bool:
    """Ask SLURM to requeue this job; return True on success."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        log.error("scontrol requeue %s failed (%s); start the job again by hand.", job, str(why).strip())
        return False
    log.info("SLURM will start job %s again", job)
    return True
