"""`lightning-sv fit` and `validate`: LightningCLI, what a stop or a damaged checkpoint means, the run's picture."""

import atexit
import itertools
import json
import logging
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.settings import while_restoring
from lightning_sv.lit.cli import PretrainCLI
from lightning_sv.lit.ranks import leave_group, rank
from lightning_sv.lit.signals import StoppedError, requeue
from lightning_sv.lit.summary import print_summary
from lightning_sv.log import quiet_libraries
from lightning_sv.plan.plan import fitting_micro_batch
from lightning_sv.runs.directory import PICTURE, SUMMARY
from lightning_sv.runs.trust import check_resumed, split_allow
from lightning_sv.settings.model import is_of_transformers
from lightning_sv.settings.paths import expand_path
from lightning_sv.settings.plain_parser import underscored
from lightning_sv.settings.trainer import quiet_warnings

log = logging.getLogger(__name__)

#: which weights to start from
_START = "--model.init_from"


def run(argv: list[str]) -> int:
    """Train, draw `run.png`, show the figures; return the exit code."""
    return _run(["fit", *_with_sizes(underscored(argv))])


def validate(argv: list[str]) -> int:
    """Show the validation loss of a checkpoint; return the exit code."""
    return _run(["validate", *underscored(argv)])


def _with_sizes(argv: list[str]) -> list[str]:
    """Add after --model.init_from DIR, of transformers, the sizes of its model; a run's own config holds them already.

    Raises:
        ConfigError: the folder holds no model that can be read
    """
    words: list[str] = []
    parts = [part for word in argv for part in (word.split("=", 1) if word.startswith(_START) else [word])]
    for flag, word in itertools.pairwise(["", *parts]):
        words.append(word)
        if flag != _START or word == "null":
            continue
        word = expand_path(word, flag)
        if is_of_transformers(word):
            from lightning_sv.interop.hf import backbone_config

            sizes = asdict(backbone_config(word))
            own = ("name", "router", "init_std", "init_residual_scaling")
            given = {key: value for key, value in sizes.items() if key not in own and value is not None}
            words += [f"--model.backbone.{key}={json.dumps(value)}" for key, value in given.items()]
    return words


def _run(argv: list[str]) -> int:
    quiet_libraries()
    quiet_warnings()
    argv, allow = split_allow(argv)
    check_resumed(argv, allow)
    atexit.register(leave_group)
    try:
        with ExitStack() as cleanup:
            done = PretrainCLI(argv, cleanup, fitting_micro_batch)
            if done.summary is not None:
                _show(done.summary, done.run_dir, as_json=done.json)
    except StoppedError as stopped:
        return 0 if stopped.requeue and (rank() or requeue()) else stopped.code
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if any(word.startswith("--ckpt_path") for word in argv) and while_restoring(error):
            why = " ".join(str(error).split())
            raise ConfigError(f"the checkpoint cannot be resumed ({type(error).__name__}: {why}).") from error
        raise
    return 0


def _show(summary: dict[str, Any], run_dir: Path, *, as_json: bool) -> None:
    """Draw `run.png` and show the figures of a complete run, which stays complete if that fails."""
    try:
        # At the end of a run alone: matplotlib would delay every first step.
        from lightning_sv.analysis.run_plot import draw_run
        from lightning_sv.runs.events import read_run

        draw_run(read_run(run_dir), run_dir / PICTURE)
    except Exception as error:
        log.warning("%s could not be drawn (%s: %s)", run_dir / PICTURE, type(error).__name__, error)
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), **summary}, indent=2))
        return
    try:
        print_summary(Console(), summary, run_dir)
    except LookupError as error:  # of an earlier version
        log.warning("%s has no %s", run_dir / SUMMARY, error)
