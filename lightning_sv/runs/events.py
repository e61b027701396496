"""Curves, config and summary of a run directory.

The step of every scalar in the event files is the number of training tokens seen so far, so that
runs with different batch sizes share one axis.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError, NotTestableError, did_you_mean
from lightning_sv.runs.directory import (
    CONFIG,
    SUMMARY,
    config_value,
    event_files,
    is_begun,
    is_complete,
    is_diverged,
    read_config,
    read_summary,
)
from lightning_sv.runs.event_files import read_points
from lightning_sv.runs.tags import TRAIN_LOSS, VAL_LOSS

log = logging.getLogger(__name__)

#: what an error expects, with a hint
_A_RUN = "the directory of a run, e.g. runs/tiny/hg+dp+or-seed0. `lightning-sv runs` lists them."
#: column of results.csv with `Run.late_train_loss`
LATE_TRAIN_LOSS = "train_loss_last_tenth"


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
        if tag in self.curves:
            return self.curves[tag]
        if self.recorded:
            raise NotTestableError(f"{self.dir.name} was recorded without {tag!r}; train it here.")
        near = did_you_mean(tag, self.curves)
        raise NotTestableError(f"{self.dir} logged no scalar named {tag!r}.{near}")

    @property
    def seq_len(self) -> int:
        """Tokens per training sequence, from the config."""
        value = config_value(self.config, "data.seq_len")
        if not isinstance(value, int) or value <= 0:
            found = f"{self.dir / CONFIG}: data.seq_len is {value!r}"
            raise ConfigError(f"{found}; expected an integer above 0.")
        return value

    @property
    def mask_documents(self) -> bool:
        """True if no document attended to those before it in training."""
        return bool(config_value(self.config, "model.mask_documents"))

    @property
    def val_loss(self) -> float:
        """Last validation loss of the run, in nats per token."""
        return float(self.curve(VAL_LOSS).values[-1])

    @property
    def full_last_validation(self) -> bool:
        """True if the last validation read the whole split; older runs lack the key."""
        return bool(config_value(self.config, "data.full_last_validation"))

    @property
    def losses_on_same_sequences(self) -> Curve:
        """Validation losses without a last one that reads more sequences than those before.

        Its difference to the others is not that of training alone.
        """
        curve = self.curve(VAL_LOSS)
        if len(curve.tokens) < 2:
            return curve
        reads_part_before = config_value(self.config, "data.val_sequences") is not None
        if self.full_last_validation and reads_part_before:
            return Curve(curve.tokens[:-1], curve.values[:-1])
        return curve

    @property
    def late_train_loss(self) -> float | None:
        """Mean training loss of the last tenth of the steps; None if it was not logged."""
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
        complete: if True, reject an unfinished run; if False, read the existing part of any run, or
            of a folder with event files only

    Raises:
        ConfigError: the directory is missing, has no scalars or an unreadable file, or
            (``complete``) lacks its config or summary, or its events contradict the summary;
            otherwise a warning is logged
    """
    directory = Path(run_dir)
    check_run_directory(directory)
    if complete:
        _check_complete(directory)
    summary = read_summary(directory)
    config = read_config(directory)
    curves = {tag: _curve(values) for tag, values in read_points(directory).items()}
    label = _label(directory, config, summary)
    if summary:
        summary = {**summary, "label": label, "seed": _seed(config, summary)}
    run = Run(directory, label, config, summary, curves)

    fault = contradiction(run)
    if fault is None:
        return run
    if complete:
        raise ConfigError(f"{fault}; train {directory} again, or leave it out.")
    log.warning("%s", fault)
    return run


def check_run_directory(directory: Path, expected: str = _A_RUN) -> None:
    """Raise `ConfigError` if a folder has no files of a run; it names what is expected."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; expected {expected}")
    has_files = is_begun(directory) or is_complete(directory)
    if not has_files and not event_files(directory):
        raise ConfigError(f"{directory} has no {CONFIG} and no event file; expected {expected}")


def _check_complete(directory: Path) -> None:
    if is_diverged(directory):
        raise ConfigError(f"{directory} diverged; expected a complete run. Leave it out.")
    for name in (SUMMARY, CONFIG):
        if not (directory / name).is_file():
            hint = "Check the path, or resume the run."
            raise ConfigError(f"{directory} has no {name}; expected a complete run. {hint}")


def _seed(config: Mapping[str, Any], summary: Mapping[str, Any]) -> int | None:
    """Return the seed of a run, from the key that set it."""
    seeds = [
        config_value(config, "model.seed"),
        config.get("seed_everything"),
        summary.get("seed"),
    ]
    for seed in seeds:
        if type(seed) is int:
            return seed
    return None


def _label(directory: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the label in a run's summary, or for an unfinished run that of its config."""
    if summary.get("label"):
        return str(summary["label"])
    scale = config_value(config, "model.scale")
    options = config_value(config, "model.scale_options")
    if not isinstance(scale, str):
        return directory.name
    if not isinstance(options, Mapping) or not any(options.values()):
        return scale
    from lightning_sv.scale import ScaleOptions  # imports torch; few runs need it

    try:
        return scale + ScaleOptions(**options).label()
    except (TypeError, ValueError, AttributeError) as error:
        found = f"{directory / CONFIG}: model.scale_options is not readable ({error})"
        raise ConfigError(f"{found}.") from error


def contradiction(run: Run) -> str | None:
    """Return a sentence if a run lacks the validation loss of its summary, or None."""
    stated = run.summary.get("val_loss")
    if stated is None:
        return None
    if VAL_LOSS not in run.curves:
        return f"{run.dir} has no {VAL_LOSS} in its event files"
    tokens = run.summary.get("tokens")
    if tokens is None:
        tokens = run.tokens
    # A run that was completed on different devices validated once more.
    is_close = np.isclose(run.val_loss, stated, rtol=0, atol=1e-3, equal_nan=True)
    if run.tokens == tokens and is_close:
        return None
    found = f"the last {VAL_LOSS} is {run.val_loss:.4f} at {run.tokens:,} tokens"
    return f"{run.dir}: {found}, its summary has {stated:.4f} at {tokens:,}"


def _curve(points: Mapping[int, float]) -> Curve:
    tokens, values = zip(*sorted(points.items()), strict=True)
    return Curve(np.array(tokens), np.array(values))
