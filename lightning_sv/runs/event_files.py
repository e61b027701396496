"""Scalars of a run from its event files, of which each start of the run wrote one.

A killed run repeats the points after its last checkpoint when it resumes:

    file 1   start 0 ......... checkpoint 500 .... point 600 (killed)
    file 2                     start 500 ......... point 600 ....

So a later file replaces what earlier files have after its start. The order of the files is that of
their numbers, not of a clock. A file whose end is missing matters only if no later file repeats it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import event_files, segment_number

#: tag -> tokens -> value
Points = dict[str, dict[int, float]]


@dataclass(frozen=True)
class EventFile:
    """One event file: the scalars that one start of a run logged.

    Attributes:
        path: path of the file
        number: number in its name, counted from 1; 0 in files of other programs
        points: its scalars
        is_complete: if True, the file was read to its end
        start: tokens after which its points count, and those of earlier files do not
        reach: tokens of its last checkpoint, or of its start
    """

    path: Path
    number: int
    points: Points
    is_complete: bool
    start: int
    reach: float

    @property
    def order(self) -> tuple[int, int]:
        """Key to sort by."""
        return self.number, self.start

    def is_repeated_by(self, later: Sequence["EventFile"]) -> bool:
        """Return True if a later start repeats the end of this file.

        A kill cuts only points after the last checkpoint, from which the later start began.
        """
        return any(other.start <= self.reach for other in later)

    def add_to(self, points: Points) -> None:
        """Add the scalars, and remove those of earlier files that this one repeats."""
        for tag, end in self._ends_of_earlier(points).items():
            points[tag] = {at: value for at, value in points[tag].items() if at <= end}
        for tag, values in self.points.items():
            points.setdefault(tag, {}).update(values)

    def _ends_of_earlier(self, points: Points) -> dict[str, int]:
        """Return tag -> tokens after which points of earlier files do not count."""
        return dict.fromkeys(points, self.start)


class ForeignFile(EventFile):
    """A file of a different program, which marks no start and no checkpoints.

    It may be one of several that are written at once, so it continues only its own tags.
    """

    @classmethod
    def of(cls, path: Path, points: Points, *, is_complete: bool) -> "ForeignFile":
        """Return the file with a start just before its first point."""
        first_points = [min(values) for values in points.values()]
        start = min(first_points, default=0) - 1
        reach = math.inf if points else -math.inf
        return cls(path, segment_number(path), points, is_complete, start, reach)

    def _ends_of_earlier(self, points: Points) -> dict[str, int]:
        continued = points.keys() & self.points.keys()
        return {tag: min(self.points[tag]) - 1 for tag in continued}


def read_points(directory: Path) -> tuple[Points, list[Path]]:
    """Return the scalars of a run, and the event files whose end is missing.

    Raises:
        ConfigError: the directory has no scalars
    """
    files = sorted(map(read_file, event_files(directory)), key=attrgetter("order"))
    if not any(file.points for file in files):
        found = f"{directory} has no TensorBoard scalars (events.out.tfevents.*)"
        raise ConfigError(f"{found}; expected a run with some.")
    points: Points = {}
    for file in files:
        file.add_to(points)
    return points, list(_cut_files(files))


def _cut_files(files: Sequence[EventFile]) -> Iterable[Path]:
    for i, file in enumerate(files):
        later = files[i + 1 :]
        if not file.is_complete and not file.is_repeated_by(later):
            yield file.path


def read_file(path: Path) -> EventFile:
    """Read one event file as far as it is readable."""
    # Imported here, because TensorBoard imports boto3, which takes half a second.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    points: Points = {}
    start: int | None = None
    reach = -math.inf
    is_complete = False
    try:
        reader = PyRecordReader_New(str(path))
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            mark = event.session_log.status
            if mark == SessionLog.START:
                start = event.step - 1
                reach = start
            elif mark == SessionLog.CHECKPOINT:
                reach = event.step
            _add_scalars(event, points)
    except OutOfRangeError:  # the end of the file
        is_complete = True
    except (DataLossError, DecodeError, MemoryError, OverflowError, TypeError, ValueError):
        pass  # a damaged record
    if start is None:
        return ForeignFile.of(path, points, is_complete=is_complete)
    return EventFile(path, segment_number(path), points, is_complete, start, reach)


def _add_scalars(event: Any, points: Points) -> None:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            of_tag = points.setdefault(value.tag, {})
            of_tag[event.step] = value.simple_value
