"""Signals that stop a run after a step, with a checkpoint, and the requeue of its SLURM job."""

import logging
import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_sv.errors import StoppedError
from lightning_sv.lit.distributed import is_child

log = logging.getLogger(__name__)

#: environment variable: also requeue the SLURM job on SIGTERM, which `scancel` sends too
REQUEUE_ON_SIGTERM = "LIGHTNING_SV_REQUEUE_ON_SIGTERM"
#: exit codes after SIGTERM, Ctrl-C, and the end of the terminal
STOPPED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
HUNG_UP = 128 + signal.SIGHUP
#: signals that end a run; SLURM sends SIGUSR1 before the end of a job's time
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1})
#: signals that shells ignore for background jobs, and nohup
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_SAID = (
    b"\nstopping after this step, with a checkpoint; "
    b"Ctrl-C again ends the run at once, without one\n"
)
_SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it


def exit_code(stopped: StoppedError) -> int:
    """Return the exit code of a stopped run; requeue its SLURM job first if requested."""
    if not stopped.requeue:
        return stopped.code
    is_first = getattr(rank_zero_only, "rank", 0) == 0
    is_requeued = requeue() if is_first else True
    return 0 if is_requeued else stopped.code


class StopSignals:
    """Record signals from before the run's setup until its summary.

    Lightning's own handlers would end a run inside a step, requeue for one signal only, and know
    no Ctrl-C with a checkpoint.

    Attributes:
        received: signals that asked this process to stop
    """

    def __init__(self) -> None:
        self.received: set[int] = set()
        self._prints = False
        self._terminals: list[int] = []  # of stdout and stderr
        self._before: dict[int, Any] = {}
        #: signal that announces the end of a SLURM job's time
        self._announcing: int = signal.SIGUSR1
        #: signals after which the SLURM job is queued again
        self._requeueing: set[int] = {signal.SIGUSR1}

    def is_received(self) -> bool:
        """Return True if a signal asked this process to stop."""
        return bool(self.received)

    def listen(self, trainer: L.Trainer) -> None:
        """Replace Lightning's handlers, before the trainer installs them.

        Python installs handlers in the main thread alone; a run in another one has none.
        """
        _remove_lightnings_handlers(trainer)
        if threading.current_thread() is threading.main_thread():
            self._install(trainer)

    def _install(self, trainer: L.Trainer) -> None:
        """Install the handlers, except for signals that the shell ignores on purpose."""
        self._prints = trainer.is_global_zero
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._follow(trainer._accelerator_connector.cluster_environment)
        for number in _SIGNALS | {self._announcing}:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (is_ignored and number in _MAY_BE_IGNORED):
                self._before[number] = signal.signal(number, self._note)

    def _follow(self, environment: ClusterEnvironment) -> None:
        """Use the signal of the Trainer's SLURM plugin, and requeue only if the plugin does."""
        if isinstance(environment, SLURMEnvironment):
            self._announcing = environment.requeue_signal or signal.SIGUSR1
            if not environment.auto_requeue:
                self._requeueing = set()
                return
            self._requeueing = {self._announcing}
        if os.environ.get(REQUEUE_ON_SIGTERM):
            self._requeueing.add(signal.SIGTERM)

    def leave(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        if number == signal.SIGHUP:
            self._leave_terminals()
        if number != signal.SIGINT:
            return
        # The default handler also ends code that hangs outside Python.
        signal.signal(number, signal.SIG_DFL)
        if self._prints:
            cursor = _SHOW_CURSOR if os.isatty(2) else b""
            os.write(2, cursor + _SAID)  # print is not reentrant

    def _leave_terminals(self) -> None:
        """Discard the output to a terminal that is closed, where each write would fail."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(null, descriptor)
        os.close(null)

    def stop(self, trainer: L.Trainer) -> None:
        """Stop the run after the last step, whose checkpoint is written: a collective.

        Raises:
            StoppedError: always; with requeue if any device received a signal that requeues the
                job, and none received Ctrl-C
        """
        received = self._received_on_any_rank(trainer)
        is_interrupted = signal.SIGINT in received
        # SLURM may send SIGTERM soon after the signal that requeues.
        is_announced = not received.isdisjoint(self._requeueing)
        requeues = is_announced and not is_interrupted and "SLURM_JOB_ID" in os.environ
        code = STOPPED
        if is_interrupted:
            code = INTERRUPTED
        elif signal.SIGHUP in received:
            code = HUNG_UP
        if is_child(trainer):
            # Lightning kills the first process as soon as a child has a different exit code.
            code = 0
        raise StoppedError(trainer.global_step, code, requeues)

    def _received_on_any_rank(self, trainer: L.Trainer) -> set[int]:
        """Return the signals that any process has received, each at its own time: a collective."""
        numbers = sorted(_SIGNALS | {self._announcing})
        return {number for number in numbers if any_rank(trainer, number in self.received)}


def _remove_lightnings_handlers(trainer: L.Trainer) -> None:
    """Replace the methods with which Lightning handles signals; it has no switch for them."""
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = _do_nothing
    # Lightning would synchronize its own handlers' state between devices in every micro-batch.
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _do_nothing


def _do_nothing() -> None:
    pass


def any_rank(trainer: L.Trainer, here: bool) -> bool:
    """Return whether it holds on any device: processes receive a signal at different times."""
    if trainer.world_size == 1:
        return here
    return bool(trainer.strategy.reduce_boolean_decision(here, all=False))


def requeue() -> bool:
    """Ask SLURM to requeue this job; return True on success."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        log.error("scontrol requeue %s failed (%s); start the job again by hand.", job, reason)
        return False
    log.info("SLURM will start job %s again", job)
    return True
