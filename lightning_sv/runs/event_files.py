"""Scalars of a run from its event files, of which each start of the run wrote one.

A killed run repeats the points after its last checkpoint when it resumes:

    file 1   start 0 ......... checkpoint 500 .... point 600 (killed)
    file 2                     start 500 ......... point 600 ....

So a later file replaces what earlier files have after its start. The order of the files is that of
their numbers, not of a clock. A file whose end is missing matters only if no later file repeats it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import event_files, segment_number

#: tag -> tokens -> value
Points = dict[str, dict[int, float]]


@dataclass
class Segment:
    """One event file: the scalars that one start of a run logged.

    Attributes:
        file: path of the file
        number: number in its name, counted from 1; 0 in files of other programs
        start: tokens at which it began; None in files of other programs, which do not mark it
        reach: tokens of its last checkpoint, or of its start; infinite in files of other programs
        points: its scalars
        is_complete: if True, the file was read to its end
    """

    file: Path
    number: int
    start: int | None = None
    reach: float = -math.inf
    points: Points = field(default_factory=dict)
    is_complete: bool = False

    @property
    def first_tokens(self) -> int:
        """Tokens after which its points count, and those of earlier files do not."""
        if self.start is not None:
            return self.start
        first_points = [min(values) for values in self.points.values()]
        return min(first_points, default=0) - 1

    @property
    def order(self) -> tuple[int, int]:
        """Key to sort by."""
        return self.number, self.first_tokens

    def is_repeated_by(self, later: Sequence["Segment"]) -> bool:
        """Return True if a later start repeats the end of this file.

        A kill cuts only points after the last checkpoint, from which the later start began.
        """
        return any(other.first_tokens <= self.reach for other in later)

    def replace_in(self, points: Points) -> None:
        """Add the scalars, and remove those of earlier files that this one repeats."""
        for tag in self._continued(points):
            end = self.start if self.start is not None else min(self.points[tag]) - 1
            points[tag] = {at: value for at, value in points[tag].items() if at <= end}
        for tag, values in self.points.items():
            points.setdefault(tag, {}).update(values)

    def _continued(self, points: Points) -> set[str]:
        """Return the tags whose earlier points after the start of this file do not count.

        A file of another program may be one of several that are written at once, so it continues
        only its own tags.
        """
        is_of_other_program = self.start is None
        return points.keys() & self.points.keys() if is_of_other_program else set(points)


def read_points(directory: Path) -> tuple[Points, list[Path]]:
    """Return the scalars of a run, and the event files whose end is missing.

    Raises:
        ConfigError: the directory has no scalars
    """
    segments = sorted(map(read_segment, event_files(directory)), key=attrgetter("order"))
    if not any(segment.points for segment in segments):
        found = f"{directory} has no TensorBoard scalars (events.out.tfevents.*)"
        raise ConfigError(f"{found}; expected a run with some.")
    points: Points = {}
    for segment in segments:
        segment.replace_in(points)
    return points, list(_cut_files(segments))


def _cut_files(segments: Sequence[Segment]) -> Iterable[Path]:
    for i, segment in enumerate(segments):
        later = segments[i + 1 :]
        if not segment.is_complete and not segment.is_repeated_by(later):
            yield segment.file


def read_segment(file: Path) -> Segment:
    """Read one event file as far as it is readable."""
    # Imported here, because TensorBoard imports boto3, which takes half a second.
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    segment = Segment(file, segment_number(file))
    try:
        reader = PyRecordReader_New(str(file))
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            mark = event.session_log.status
            if mark == SessionLog.START:
                segment.start = event.step - 1
                segment.reach = segment.start
            elif mark == SessionLog.CHECKPOINT:
                segment.reach = event.step
            _add_scalars(event, segment.points)
    except OutOfRangeError:  # the end of the file
        segment.is_complete = True
    except (DataLossError, DecodeError, MemoryError, OverflowError, TypeError, ValueError):
        pass  # a damaged record
    if segment.start is None and segment.points:  # a file of a different program
        segment.reach = math.inf
    return segment


def _add_scalars(event: Any, points: Points) -> None:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            of_tag = points.setdefault(value.tag, {})
            of_tag[event.step] = value.simple_value
