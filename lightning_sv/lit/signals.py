"""Signals that ask a run to stop, Ctrl-C among them: noted when they come, obeyed at the end of the optimizer step."""

import logging
import os
import re
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L

from lightning_sv.errors import StoppedError
from lightning_sv.lit.distributed import rank

log = logging.getLogger(__name__)

#: environment variable: SLURM is asked to requeue the job on SIGTERM as well, which `scancel` sends too
REQUEUE_ON_SIGTERM = "LIGHTNING_SV_REQUEUE_ON_SIGTERM"
#: exit status of a program that SIGTERM ended, Ctrl-C, or the end of its terminal
STOPPED, INTERRUPTED, HUNG_UP = (128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: which a shell ignores for what it starts in the background, and nohup
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_SAID = b"\nstopping after this step, with a checkpoint; Ctrl-C again ends the run at once, without\n"
_SHOW_CURSOR = b"\x1b[?25h"  # the bar hides it, and a second Ctrl-C would leave it so


def exit_code(stopped: StoppedError) -> int:
    """Return the exit status of a stopped program, after asking SLURM to start the job again if announced."""
    return 0 if stopped.requeue and (rank() or requeue()) else stopped.code


class StopSignals:
    """Notes signals from before the run's setup until its summary; Lightning's own handlers end it inside a step."""

    def __init__(self) -> None:
        self._speaks = False
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self, trainer: L.Trainer) -> None:
        """Take the signals over, before the trainer does; Python allows that in the main thread only."""
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        # Lightning asks the devices for its own handlers' notes, and waits for the answer, before every micro-batch.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        self._speaks = trainer.is_global_zero
        for number in _SIGNALS:
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def leave(self) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the system's own: it ends even what hangs below Python
            if self._speaks:
                os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + _SAID)  # print may be what was interrupted

    @property
    def came(self) -> bool:
        """Whether this process was asked to stop."""
        return self._received is not None

    def stop(self, trainer: L.Trainer) -> None:
        """End the run after the last step, whose checkpoint is written: a collective.

        Raises:
            StoppedError: always; requeue if SLURM gave any device the signal that announces the end of the job's time,
                or SIGTERM where `REQUEUE_ON_SIGTERM` is set
        """
        kinds = (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        announced, interrupted, hung_up = (self._received == number for number in kinds)
        announced |= self._received == signal.SIGTERM and bool(os.environ.get(REQUEUE_ON_SIGTERM))
        if trainer.world_size > 1:  # the signal reaches one process before another
            announced, interrupted, hung_up = (
                trainer.strategy.reduce_boolean_decision(kind, all=False) for kind in (announced, interrupted, hung_up)
            )
        code = INTERRUPTED if interrupted else HUNG_UP if hung_up else STOPPED
        raise StoppedError(trainer.global_step, code, announced and not interrupted and "SLURM_JOB_ID" in os.environ)


def requeue() -> bool:
    """Ask SLURM to start this job again; whether it will."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        log.error("%r is not a SLURM job number; start the job again by hand.", job)
        return False
    try:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        log.error("scontrol could not be run (%s); start the job again by hand.", error)
        return False
    if answer.returncode:
        log.error("scontrol requeue %s failed: %s", job, answer.stderr.strip())
        return False
    log.info("SLURM will start job %s again", job)
    return True
