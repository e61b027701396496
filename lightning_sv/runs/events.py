"""Curves, config and summary of a run directory.

The step of every scalar in the event files is the number of training tokens seen so far, so that runs with different
batch sizes share one axis.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError, NotTestableError, expect
from lightning_sv.runs.directory import (
    CONFIG,
    SUMMARY,
    config_value,
    event_files,
    is_begun,
    is_complete,
    read_config,
    read_summary,
    segment_number,
)

log = logging.getLogger(__name__)

VAL_LOSS = "val/loss"
TRAIN_LOSS = "train/loss"
#: column of results.csv with `Run.late_train_loss`
LATE_TRAIN_LOSS = "train_loss_last_tenth"
#: prefix of the tags of `callbacks.CopyingMonitor`
COPYING = "copying/"


class Curve(NamedTuple):
    """One scalar over training: ``values[i]`` was logged after ``tokens[i]`` training tokens."""

    tokens: NDArray[np.int64]  # (N,), strictly increasing
    values: NDArray[np.float64]  # (N,)


@dataclass(frozen=True, eq=False)
class Run:
    """One training run, read from its directory.

    Attributes:
        label: the strategy's label, e.g. ``hg+dnp+or+iwd``
        summary: content of ``summary.json``; empty for an incomplete run
        curves: curve of every scalar tag
        recorded: if True, the run is a row of results.csv, which has no config and few scalars
    """

    dir: Path
    label: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    curves: Mapping[str, Curve] = field(repr=False)
    recorded: bool = False

    def curve(self, tag: str) -> Curve:
        """Return the curve of a tag, in order of tokens.

        Raises:
            NotTestableError: the run logged no such scalar
        """
        if tag not in self.curves:
            if self.recorded:
                raise NotTestableError(f"{self.dir.name} was recorded without {tag!r}; train it here.")
            near = get_close_matches(tag, self.curves, n=5) or sorted(self.curves)[:5]
            others = len(self.curves) - len(near)
            known = ", ".join(near) + (f" and {others} others" if others else "")
            raise NotTestableError(f"{self.dir} logged no scalar named {tag!r}, but {known}.")
        return self.curves[tag]

    @property
    def seq_len(self) -> int:
        """Tokens per training sequence, from the config."""
        value = config_value(self.config, "data.seq_len")
        fits = isinstance(value, int) and value > 0
        expect(fits, f"{self.dir / CONFIG}: data.seq_len", repr(value), "an integer above 0.")
        return int(value)

    @property
    def val_loss(self) -> float:
        """Last validation loss of the run, in nats per token."""
        return float(self.curve(VAL_LOSS).values[-1])

    @property
    def late_train_loss(self) -> float | None:
        """Mean training loss of the last tenth of the steps, in nats per token; None if it was not logged."""
        if TRAIN_LOSS not in self.curves:
            return self.summary.get(LATE_TRAIN_LOSS)
        curve = self.curves[TRAIN_LOSS]
        is_late = curve.tokens > 0.9 * curve.tokens[-1]
        return float(curve.values[is_late].mean())

    @property
    def tokens(self) -> int:
        """Training tokens seen at the last evaluation."""
        return int(self.curve(VAL_LOSS).tokens[-1])


def read_run(run_dir: str | Path, *, complete: bool = True) -> Run:
    """Read one run directory.

    Args:
        run_dir: directory with event files, ``config.yaml`` and ``summary.json``
        complete: if True, reject an unfinished run; if False, read the existing part of any run, or of a folder with
            event files only

    Raises:
        ConfigError: the directory is missing, has no scalars or an unreadable file, or (``complete``) lacks its config
            or summary, or its events are missing or contradict the summary; otherwise a warning is logged
    """
    directory = Path(run_dir)
    expect(directory.is_dir(), str(directory), "not a folder", "the directory of a run. Check the path.")
    if not (is_begun(directory) or is_complete(directory) or event_files(directory)):
        hint = "`lightning-sv runs` lists those in runs/."
        raise ConfigError(f"{directory} is a folder without {CONFIG} and scalars; expected that of a run. {hint}")
    for name in (SUMMARY, CONFIG) if complete else ():
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} has no {name}; expected a complete run. Check the path, or resume the run.")
    summary, config = read_summary(directory), read_config(directory)
    curves, cut = _read_curves(directory)
    seeds = (config_value(config, "model.seed"), config.get("seed_everything"), summary.get("seed"))
    label, seed = _label(directory, config, summary), next((seed for seed in seeds if type(seed) is int), None)
    run = Run(directory, label, config, summary and {**summary, "label": label, "seed": seed}, curves)
    why = f"{cut[0]} is cut or damaged" if cut and summary else contradiction(run)
    if why and complete:
        raise ConfigError(f"{why}; train {directory} again, or leave it out.")
    if why:
        log.warning("%s", why)
    return run


def _label(directory: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the label in a run's summary, or for an unfinished run that of its config."""
    scale, options = (config_value(config, f"model.{key}") for key in ("scale", "scale_options"))
    if summary.get("label") or not isinstance(scale, str):
        return summary.get("label") or directory.name
    if not isinstance(options, Mapping) or not any(options.values()):
        return scale
    from lightning_sv.scale import ScaleOptions  # imports torch; few runs need it

    try:
        return scale + ScaleOptions(**options).label()
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{directory / CONFIG}: model.scale_options is not readable ({error}).") from error


def contradiction(run: Run) -> str | None:
    """Return a sentence if a run's last validation loss differs from its summary, or None."""
    stated, losses = run.summary.get("val_loss"), run.curves.get(VAL_LOSS)
    if stated is None or losses is None:
        return None
    tokens = run.tokens if run.summary.get("tokens") is None else run.summary["tokens"]
    # A run that was completed on different devices validated once more.
    if run.tokens == tokens and np.isclose(run.val_loss, stated, rtol=0, atol=1e-3, equal_nan=True):
        return None
    found = f"the last {VAL_LOSS} is {run.val_loss:.4f} at {run.tokens:,} tokens"
    return f"{run.dir}: {found}, its summary has {stated:.4f} at {tokens:,}"


class _Segment(NamedTuple):
    """One event file: the scalars that one start of a run logged.

    Attributes:
        number: number in the file's name, counted from 1; 0 in files of other programs
        start: tokens at which it began; None if the file was not written by `RunLogger`
        reach: tokens of its last checkpoint, or of its start
        points: tag -> tokens -> value
        complete: if True, the file was read to its end
    """

    file: Path
    number: int
    start: int | None
    reach: int
    points: dict[str, dict[int, float]]
    complete: bool

    @property
    def order(self) -> tuple[int, int, int]:
        """Key to sort by, without a clock. Of two starts from one checkpoint, the one that reached further is later."""
        first_points = [min(tokens) for tokens in self.points.values()]
        first = min(first_points, default=0) if self.start is None else self.start
        return self.number, first, self.reach

    @property
    def is_empty(self) -> bool:
        """Whether the file has neither a point nor a mark."""
        return self.start is None and not self.points


def _read_curves(directory: Path) -> tuple[dict[str, Curve], list[Path]]:
    """Return the curves without points that a resumed run repeated, and the event files whose end is missing."""
    segments = sorted(map(_read_segment, event_files(directory)), key=attrgetter("order"))
    if not any(segment.points for segment in segments):
        raise ConfigError(f"{directory} has no TensorBoard scalars (events.out.tfevents.*); expected a run with some.")
    curves: dict[str, dict[int, float]] = {}
    cut = []
    for i, segment in enumerate(segments):
        if not segment.complete and not _is_repeated(segment, segments[i + 1 :]):
            cut.append(segment.file)
        # Without a start, each tag continues at its first point in the file.
        for tag in curves if segment.start is not None else segment.points.keys() & curves.keys():
            end = min(segment.points[tag]) - 1 if segment.start is None else segment.start
            curves[tag] = {tokens: value for tokens, value in curves[tag].items() if tokens <= end}
        for tag, values in segment.points.items():
            curves.setdefault(tag, {}).update(values)
    columns = {tag: zip(*sorted(points.items()), strict=True) for tag, points in curves.items() if points}
    return {tag: Curve(*map(np.array, pair)) for tag, pair in columns.items()}, cut


def _is_repeated(segment: _Segment, later: Sequence[_Segment]) -> bool:
    """Return True if a later start repeats the end of a segment: a kill cuts only points after the last checkpoint."""
    if segment.is_empty:
        return False
    if segment.start is None:
        return bool(later)
    return any(each.start is None or each.start <= segment.reach for each in later)


def _read_segment(file: Path) -> _Segment:
    # Imported here, because TensorBoard imports boto3, which takes half a second.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    start: int | None = None
    reach = 0
    complete = False
    points: dict[str, dict[int, float]] = {}
    try:
        reader = PyRecordReader_New(str(file))
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            mark = event.session_log.status
            if mark == SessionLog.START:
                start = reach = event.step - 1
            elif mark == SessionLog.CHECKPOINT:
                reach = event.step
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.setdefault(value.tag, {})[event.step] = value.simple_value
    except OutOfRangeError:  # the end of the file
        complete = True
    except (DataLossError, DecodeError, MemoryError, OverflowError, TypeError, ValueError):  # a damaged record
        pass
    return _Segment(file, segment_number(file), start, reach, points, complete)
