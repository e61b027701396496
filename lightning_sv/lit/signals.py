"""Signals that ask a run to stop, including Ctrl-C, handled at the end of the optimizer step."""

import logging
import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L

from lightning_sv.errors import StoppedError
from lightning_sv.lit.distributed import rank

log = logging.getLogger(__name__)

#: environment variable: also requeue the SLURM job on SIGTERM, which `scancel` sends too
REQUEUE_ON_SIGTERM = "LIGHTNING_SV_REQUEUE_ON_SIGTERM"
#: exit codes after SIGTERM, Ctrl-C, and the end of the terminal
STOPPED, INTERRUPTED, HUNG_UP = (128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: signals that shells ignore for background jobs, and nohup
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_SAID = b"\nstopping after this step, with a checkpoint; Ctrl-C again ends the run at once, without\n"
_SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it


def exit_code(stopped: StoppedError) -> int:
    """Return the exit code of a stopped run; requeue its SLURM job first if requested."""
    return 0 if stopped.requeue and (rank() or requeue()) else stopped.code


class StopSignals:
    """Record signals from before the run's setup until its summary; Lightning's handlers would stop within a step."""

    def __init__(self) -> None:
        self._speaks = False
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self, trainer: L.Trainer) -> None:
        """Install the handlers before the trainer does; Python allows that in the main thread only."""
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        # Lightning would synchronize its own handlers' state between devices before every micro-batch.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        self._speaks = trainer.is_global_zero
        for number in _SIGNALS:
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def leave(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the default handler also ends code that hangs outside Python
            if self._speaks:
                os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + _SAID)  # print is not reentrant

    @property
    def came(self) -> bool:
        """True if this process was asked to stop."""
        return self._received is not None

    def stop(self, trainer: L.Trainer) -> None:
        """Stop the run after the last step, whose checkpoint is written: a collective.

        Raises:
            StoppedError: always; with requeue if SLURM announced the end of the job's time to any device, or sent
                SIGTERM and `REQUEUE_ON_SIGTERM` is set
        """
        kinds = (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        announced, interrupted, hung_up = (self._received == number for number in kinds)
        announced |= self._received == signal.SIGTERM and bool(os.environ.get(REQUEUE_ON_SIGTERM))
        if trainer.world_size > 1:  # processes receive the signal at different times
            announced, interrupted, hung_up = (
                trainer.strategy.reduce_boolean_decision(kind, all=False) for kind in (announced, interrupted, hung_up)
            )
        code = INTERRUPTED if interrupted else HUNG_UP if hung_up else STOPPED
        raise StoppedError(trainer.global_step, code, announced and not interrupted and "SLURM_JOB_ID" in os.environ)


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
