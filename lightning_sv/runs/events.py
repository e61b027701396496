"""Run directory -> curves, config, summary: what a training run left behind.

The step of every scalar in the event files is the number of training tokens seen so far, so that
runs of different batch sizes share one axis.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

from lightning_sv.errors import ConfigError, NotTestableError
from lightning_sv.runs.directory import (
    CONFIG,
    SUMMARY,
    config_value,
    event_files,
    is_begun,
    is_complete,
    read_config,
    read_summary,
)

log = logging.getLogger(__name__)

VAL_LOSS = "val/loss"
TRAIN_LOSS = "train/loss"
#: beginning of the tags of `callbacks.CopyingMonitor`
COPYING = "copying/"


class Curve(NamedTuple):
    """One scalar over training: ``values[i]`` was logged after ``tokens[i]`` training tokens."""

    tokens: NDArray[np.int64]  # (N,), strictly increasing
    values: NDArray[np.float64]  # (N,)


class DamagedEventsError(ConfigError):
    """The event files of a complete run are cut, or contradict its summary: it decides nothing."""


@dataclass(frozen=True, eq=False)
class Run:
    """One training run as read from its directory.

    Attributes:
        label: the strategy's label, e.g. ``hg+dnp+or+iwd``
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
            NotTestableError: the run logged no such scalar
        """
        if tag not in self.curves:
            known = ", ".join(sorted(self.curves))
            if self.recorded:
                raise NotTestableError(f"of {self.dir.name} only {known} is recorded, {tag!r} is not; train it here.")
            raise NotTestableError(f"{self.dir} logged no scalar named {tag!r}; it has {known}.")
        return self.curves[tag]

    @property
    def seq_len(self) -> int:
        """Tokens of a training sequence, from the config."""
        value = config_value(self.config, "data.seq_len")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.dir / CONFIG}: data.seq_len is {value!r}; expected a whole number above 0.")
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
        ConfigError: the directory is missing, holds no scalars, has an unreadable file, or
            (``complete``) lacks its config or summary
        DamagedEventsError: (``complete``) events are missing, or contradict the summary; a warning without
    """
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ConfigError(f"There is no run directory {directory}; check the path.")
    if complete and not is_complete(directory):
        raise ConfigError(f"The run in {directory} is not complete (no {SUMMARY}); let it finish, or run it again.")
    if complete and not is_begun(directory):
        raise ConfigError(f"{directory} has no {CONFIG}; give a directory that `fit` wrote.")
    summary, config = read_summary(directory), read_config(directory)
    curves, cut = _read_curves(directory)
    label, seed = _label(directory, config, summary), _seed(config, summary)
    run = Run(directory, label, config, summary and {**summary, "label": label, "seed": seed}, curves)
    why = f"{cut[0]} is cut or damaged" if cut and summary else contradiction(run)
    if why and complete:
        raise DamagedEventsError(f"{why}; train {directory} again, or leave it out.")
    if why:
        log.warning("%s", why)
    return run


def _label(directory: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the label of a run: its summary's, unless the config names another strategy."""
    stated = summary.get("label") or None
    scale, options = (config_value(config, f"model.{key}") for key in ("scale", "scale_options"))
    if not isinstance(scale, str) or not scale:
        return stated or directory.name
    own = scale
    if isinstance(options, Mapping) and any(options.values()):
        from lightning_sv.scale import ScaleOptions  # a second, for few runs

        try:
            own += ScaleOptions(**options).label()
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{directory / CONFIG}: model.scale_options is not readable ({error}).") from error
    if stated is None or stated == own:
        return own
    from lightning_sv.scale.strategy import own_tokens  # torch with it, where a strategy is spelt in two ways

    (one, _, its_options), (other, _, options) = stated.partition("["), own.partition("[")
    return stated if own_tokens(one) == own_tokens(other) and its_options == options else own


def _seed(config: Mapping[str, Any], summary: Mapping[str, Any]) -> int | None:
    given = (config_value(config, "model.seed"), config.get("seed_everything"), summary.get("seed"))
    return next((seed for seed in given if type(seed) is int), None)


def contradiction(run: Run) -> str | None:
    """Return how the end of a run's validation losses differs from its summary; None if it does not."""
    stated, losses = run.summary.get("val_loss"), run.curves.get(VAL_LOSS)
    if stated is None or losses is None:
        return None
    tokens = run.tokens if run.summary.get("tokens") is None else run.summary["tokens"]
    # A run that was completed on other devices validated once more.
    if run.tokens == tokens and np.isclose(run.val_loss, stated, rtol=0, atol=1e-3, equal_nan=True):
        return None
    return (
        f"{run.dir}: the last {VAL_LOSS} is {run.val_loss:.4f} at {run.tokens:,} tokens, its summary has "
        f"{stated:.4f} at {tokens:,}"
    )


class _Leg(NamedTuple):
    """One event file: what one start of a run logged.

    Attributes:
        began: wall time of its first point or mark
        start: tokens at which it began; None for a file of an earlier version, which does not say
        saved: tokens at which it wrote a checkpoint
        points: tag -> tokens -> value
        complete: whether the file was read to its end
    """

    file: Path
    began: float
    start: int | None
    saved: set[int]
    points: dict[str, dict[int, float]]
    complete: bool


def _read_curves(directory: Path) -> tuple[dict[str, Curve], list[Path]]:
    """Return the curves of the live branch, and its event files whose end is missing."""
    found = [_read_leg(file) for file in event_files(directory)]
    legs = sorted((leg for leg in found if leg.began), key=lambda leg: leg.began)
    if not any(leg.points for leg in legs):
        raise ConfigError(
            f"{directory} holds no TensorBoard scalars (events.out.tfevents.*); "
            "give the directory of a run that has logged something."
        )
    # Each leg as the branch that ends with it. A leg that ended before its first checkpoint has no successor.
    branches: list[list[_Leg]] = []
    for leg in legs:
        parents = [b for b in reversed(branches) if leg.start is not None and leg.start in b[-1].saved]
        branches.append([*(*parents, *reversed(branches), [])[0], leg])
    live = branches[-1]
    curves: dict[str, dict[int, float]] = {}
    cut = [leg.file for leg in found if not leg.began and not leg.complete]
    for leg, following in zip(live, [*live[1:], None], strict=True):
        # What a kill cuts is beyond the checkpoint, before which all was written.
        resumed = following is not None and (leg.start is None or following.start in leg.saved)
        if not leg.complete and not resumed:
            cut.append(leg.file)
        # Files of earlier versions do not say where they start: a tag goes on where they first have it.
        for tag in curves if leg.start is not None else leg.points.keys() & curves.keys():
            end = min(leg.points[tag]) - 1 if leg.start is None else leg.start
            curves[tag] = {tokens: value for tokens, value in curves[tag].items() if tokens <= end}
        for tag, points in leg.points.items():
            curves.setdefault(tag, {}).update(points)
    live_curves = {}
    for tag, points in curves.items():
        if points:
            tokens, values = zip(*sorted(points.items()), strict=True)
            live_curves[tag] = Curve(np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float64))
    return live_curves, cut


def _read_leg(file: Path) -> _Leg:
    began, start, complete = 0.0, None, True
    saved: set[int] = set()
    points: dict[str, dict[int, float]] = {}
    plugins: dict[str, str] = {}  # the first value of a tag alone names its plugin
    try:
        for record in _records(file):
            event = Event.FromString(record)
            mark = event.session_log.status
            if mark == SessionLog.START:
                start = event.step - 1
            elif mark == SessionLog.CHECKPOINT:
                saved.add(event.step)
            for value in event.summary.value:
                plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                kind = value.WhichOneof("value")
                if kind == "simple_value":
                    points.setdefault(value.tag, {})[event.step] = value.simple_value
                elif kind == "tensor" and plugin == "scalars":
                    points.setdefault(value.tag, {})[event.step] = float(make_ndarray(value.tensor).item())
            if mark or points:
                began = began or event.wall_time
    except (EOFError, DecodeError, TypeError, ValueError):  # also a tensor that is no number
        complete = False
    return _Leg(file, began, start, saved, points, complete)


def _records(file: Path) -> Iterator[bytes]:
    """Yield the records of an event file: length, its checksum, data, its checksum.

    Raises:
        EOFError: the next record is cut or altered
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        while head := stream.read(12):
            length = int.from_bytes(head[:8], "little")
            data = stream.read(length) if length < size else b""
            for part, checksum in ((head[:8], head[8:]), (data, stream.read(4))):
                if masked_crc32c(part).to_bytes(4, "little") != checksum:
                    raise EOFError
            yield data
