"""Scalars of a run from its event files, of which each start of the run wrote one.

A killed run repeats the points after its last checkpoint when it resumes:

    file 1   start 0 ......... checkpoint 500 .... point 600 (killed)
    file 2                     start 500 ......... point 600 ....

Each start marks its first token in its file. TensorBoard then drops later points of earlier files.
"""

import logging
from pathlib import Path

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import event_files

#: tag -> tokens -> value
Points = dict[str, dict[int, float]]

#: number of events that are kept per tag: all scalars, and as few others as possible
_KEPT = {"scalars": 0, "histograms": 1, "compressedHistograms": 1, "images": 1, "tensors": 1}


def read_points(directory: Path) -> Points:
    """Return the scalars of a run, up to a damaged record of each file.

    Raises:
        ConfigError: the directory has no scalars, or a file of other events
    """
    # Imported here, because TensorBoard imports boto3, which takes half a second.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of points that it drops
    event_files(directory)  # refuses pipes, for which TensorBoard would wait
    events = EventAccumulator(str(directory), size_guidance=_KEPT)
    try:
        events.Reload()
    except Exception as error:  # TensorBoard raises various errors
        found = f"{directory} has a damaged event file ({error!r:.200})"
        raise ConfigError(f"{found}; train the run again.") from error
    tags = events.Tags()["scalars"]
    if not tags:
        found = f"{directory} has no TensorBoard scalars (events.out.tfevents.*)"
        raise ConfigError(f"{found}; expected a run with some.")
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
