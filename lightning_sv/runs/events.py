"""Run directory -> curves, config, summary: what a training run left behind.

The step of every scalar in the event files is the number of training tokens seen so far, so that
runs of different batch sizes share one axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sv.runs.directory import CONFIG, SUMMARY, event_files, is_begun, is_complete, read_config, read_summary

VAL_LOSS = "val/loss"
TRAIN_LOSS = "train/loss"
#: beginning of the tags of `callbacks.CopyingMonitor`
COPYING = "copying/"


class Curve(NamedTuple):
    """One scalar over training: ``values[i]`` was logged after ``tokens[i]`` training tokens."""

    tokens: NDArray[np.int64]  # (N,), strictly increasing
    values: NDArray[np.float64]  # (N,)


@dataclass(frozen=True, eq=False)
class Run:
    """One training run as read from its directory.

    Args:
        dir: the run's directory
        label: the strategy's label, e.g. ``hg+dnp+or+iwd``
        config: the resolved configuration as nested dictionaries
        summary: ``summary.json``; empty for a run that has not completed
        curves: every scalar tag with its curve
        recorded: whether it is the row of a recording, which has no config and no scalar but the validation loss
    """

    dir: Path
    label: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    curves: Mapping[str, Curve] = field(repr=False)
    recorded: bool = False

    def curve(self, tag: str) -> Curve:
        """``tag`` -> (tokens, values), in order of tokens.

        Raises:
            ValueError: the run logged no such scalar
        """
        if tag not in self.curves:
            known = ", ".join(sorted(self.curves))
            if self.recorded:
                raise ValueError(f"of {self.dir.name} only {known} is recorded, {tag!r} is not; train it here.")
            raise ValueError(f"{self.dir} logged no scalar named {tag!r}; it has {known}.")
        return self.curves[tag]

    @property
    def seq_len(self) -> int:
        """Tokens of a training sequence, from the config."""
        data = self.config.get("data")
        value = data.get("seq_len") if isinstance(data, Mapping) else None
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.dir / CONFIG}: data.seq_len is {value!r}; it must be a whole number above 0.")
        return value

    @property
    def val_loss(self) -> float:
        """The last validation loss of the run, nats per token."""
        return float(self.curve(VAL_LOSS).values[-1])

    @property
    def tokens(self) -> int:
        """Training tokens seen at the last evaluation."""
        return int(self.curve(VAL_LOSS).tokens[-1])


def read_run(run_dir: str | Path, *, complete: bool = True) -> Run:
    """Read one run directory.

    Args:
        run_dir: directory with event files, ``config.yaml`` and ``summary.json``
        complete: refuse a run that has not finished. With False, a running or interrupted run (or a
            bare folder of event files) is read as far as it got

    Raises:
        ValueError: the directory is missing, holds no scalars, has an unreadable file, or
            (``complete``) lacks its config or summary
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ValueError(f"There is no run directory {directory}; check the path.")
    if complete and not is_complete(directory):
        raise ValueError(f"The run in {directory} is not complete (no {SUMMARY}); let it finish, or run it again.")
    if complete and not is_begun(directory):
        raise ValueError(f"{directory} has no {CONFIG}; give a directory that `fit` wrote.")
    summary, config = read_summary(directory), read_config(directory)
    model = config.get("model")
    fallback = model.get("scale") if isinstance(model, Mapping) else None
    label = summary.get("label") or (fallback if isinstance(fallback, str) else directory.name)
    return Run(directory, str(label), config, summary, _read_curves(directory))


def _read_curves(directory: Path) -> dict[str, Curve]:
    # A resumed run writes a second file that may step back to its checkpoint. All values are read
    # (no purge, no reservoir of 10,000 points); of one step, the last written value counts.
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    if event_files(directory):
        try:
            accumulator.Reload()
        except Exception as error:  # whatever TensorBoard and protobuf raise on damaged records
            raise ValueError(f"{directory}: its event files are damaged ({error!r}); run it again.") from error
    tags = accumulator.Tags()["scalars"]
    if not tags:
        raise ValueError(
            f"{directory} holds no TensorBoard scalars (events.out.tfevents.*); "
            "give the directory of a run that has logged something."
        )
    return {tag: _last_written(accumulator.Scalars(tag)) for tag in tags}


def _last_written(events: list[Any]) -> Curve:
    written = {event.step: event.value for event in sorted(events, key=lambda event: (event.step, event.wall_time))}
    return Curve(np.array(list(written), dtype=np.int64), np.array(list(written.values()), dtype=np.float64))
