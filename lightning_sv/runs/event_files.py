"""Scalars of a run from its event files, of which each start of the run wrote one.

A killed run repeats the points after its last checkpoint when it resumes:

    file 1   start 0 ......... checkpoint 500 .... point 600 (killed)
    file 2                     start 500 ......... point 600 ....

Each start marks its first token in its file, and drops later points of earlier files. The order of
the files is that of their numbers, because clocks of machines may differ, and two starts may share
a second.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import event_files, segment_number

#: tag -> tokens -> value
Points = dict[str, dict[int, float]]


def read_points(directory: Path) -> Points:
    """Return the scalars of a run, up to a damaged record of each file.

    Raises:
        ConfigError: the directory has no scalars, or a file of other events
    """
    points: Points = {}
    files = sorted(event_files(directory), key=segment_number)
    for event in _events(files):
        _drop_repeated(event, points)
        _add_scalars(event, points)
    points = {tag: values for tag, values in points.items() if values}
    if not points:
        found = f"{directory} has no TensorBoard scalars (events.out.tfevents.*)"
        raise ConfigError(f"{found}; expected a run with some.")
    return points


def _events(files: Iterable[Path]) -> Iterator[Any]:
    """Yield the events of some files in their order."""
    # Imported here, because TensorBoard imports boto3, which takes half a second.
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for file in files:
        try:
            yield from LegacyEventFileLoader(str(file)).Load()
        except Exception as error:  # TensorBoard raises various errors
            found = f"{file} is damaged ({error!r:.200})"
            raise ConfigError(f"{found}; train the run again.") from error


def _drop_repeated(event: Any, points: Points) -> None:
    """Drop the points that a start of the run repeats, if the event marks one."""
    if event.session_log.status != event.session_log.START:
        return
    for values in points.values():
        for tokens in list(values):
            if tokens >= event.step:
                del values[tokens]


def _add_scalars(event: Any, points: Points) -> None:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            points.setdefault(value.tag, {})[event.step] = value.simple_value
