"""The checkpoint from which a command starts, and the checks of a run that resumes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import check_settings
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.runs.difference import check_same
from lightning_sv.runs.directory import read_config, run_of
from lightning_sv.runs.lock import find_last_checkpoint
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.sections import leaves

#: settings of a resumed run that its checkpoint does not have
_KEPT = (
    "seed_everything", "model.seed", "data.seed", "data.val_sequences", "data.full_last_validation",
    "trainer.gradient_clip_val",
)  # fmt: skip


@dataclass(frozen=True)
class StartingPoint:
    """Checkpoint from which a command starts, known before anything is built.

    Attributes:
        checkpoint: path of the checkpoint; None for a new run
        step: step of the checkpoint; 0 for a new run
        asked_for_last: if True, the command has `--ckpt_path last`, which needs no checkpoint
    """

    checkpoint: str | None
    step: int
    asked_for_last: bool

    def __str__(self) -> str:
        return "none" if self.checkpoint is None else f"{self.checkpoint} at step {self.step}"


def find_starting_point(ckpt_path: str | None, run_dir: str | None) -> StartingPoint:
    """Find the checkpoint of `--ckpt_path`, and check its content without checksums.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged
    """
    asked_for_last = ckpt_path == "last"
    path = find_last_checkpoint(run_dir) if asked_for_last else ckpt_path
    if path is None:
        return StartingPoint(None, 0, asked_for_last)
    checkpoint = check_checkpoint(path, checksums=False)  # a run checks them once per node
    return StartingPoint(path, checkpoint.get("global_step", 0), asked_for_last)


def check_not_replaced(start: StartingPoint) -> None:
    """Check that the checkpoint is the one that was read; call this with the lock of the run.

    A process that a signal has stopped may write its last checkpoint while a new start waits for
    the lock.

    Raises:
        ConfigError: the checkpoint is of a different step
    """
    if start.checkpoint is None:
        return
    current = find_starting_point(start.checkpoint, run_dir=None)
    if current.step != start.step:
        hint = "A different process of the run has replaced it. Start again."
        raise ConfigError(f"ckpt_path is {current}; expected step {start.step}. {hint}")


def check_resumed_settings(
    checkpoint: dict[str, Any], path: str, module: Any, data: DataConfig, config: Any
) -> None:
    """Check that a run has the settings of the checkpoint that it resumes, and of its run.

    Args:
        checkpoint: content of the checkpoint
        path: path of the checkpoint
        module: `PretrainModule` of this run
        data: settings of the data
        config: values of all keys of this run

    Raises:
        ConfigError: a key differs, which the message names with both values
    """
    check_settings(
        checkpoint,
        module.settings,
        data,
        training=True,
        built_by=module.built_by,
    )
    _check_kept(run_of(Path(path)), config)


def _check_kept(run: Path | None, config: Any) -> None:
    """Check the settings that a checkpoint does not have, against the config of its run."""
    recorded = {} if run is None else leaves(read_config(run))
    hint = "Resume with the same settings, or start a new run."
    for key in _KEPT:
        then = recorded.get(key, config[key])  # the run of an older version lacks newer keys
        check_same(key, then, config[key], "the run of the checkpoint", hint)
