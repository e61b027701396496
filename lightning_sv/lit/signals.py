"""Signals that ask a run to stop: noted when they come, obeyed at the end of the optimizer step."""

import os
import re
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Any

import lightning as L

#: exit status of a program that SIGTERM ended
STOPPED = 128 + signal.SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StoppedError(Exception):
    """The run was asked to stop, and stopped after a step with a checkpoint.

    Attributes:
        requeue: whether SLURM is asked to start the job again.
    """

    def __init__(self, step: int, requeue: bool):
        super().__init__(f"stopped after step {step}, as asked by a signal")
        self.requeue = requeue


class StopSignals:
    """Notes SIGTERM and SIGUSR1; Lightning's own handlers save or end the run in the middle of a step."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self, trainer: L.Trainer) -> None:
        """Take the signals over; Python allows that in the main thread only."""
        # Lightning asks the devices for its own handlers' notes, and waits for the answer, before every micro-batch.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def leave(self) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    @property
    def came(self) -> bool:
        """Whether this process was asked to stop."""
        return self._received is not None

    def stop(self, trainer: L.Trainer) -> None:
        """End the run after the last step, whose checkpoint is written: a collective.

        Raises:
            StoppedError: always; requeue if SLURM gave any device the signal that announces the end of the job's time.
        """
        announced = self._received == signal.SIGUSR1
        if trainer.world_size > 1:  # the signal reaches one process before another
            announced = trainer.strategy.reduce_boolean_decision(announced, all=False)
        raise StoppedError(trainer.global_step, announced and "SLURM_JOB_ID" in os.environ)


def requeue() -> bool:
    """Ask SLURM to start this job again; whether it will."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        print(f"error: {job!r} is not a SLURM job number; start the job again by hand.", file=sys.stderr)
        return False
    try:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        print(f"error: scontrol could not be run ({error}); start the job again by hand.", file=sys.stderr)
        return False
    if answer.returncode:
        print(f"error: scontrol requeue {job} failed: {answer.stderr.strip()}", file=sys.stderr)
        return False
    print(f"SLURM will start job {job} again", file=sys.stderr)
    return True
