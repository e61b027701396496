"""`lightning-sv validate`: the validation loss of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from lightning_sv.cli.fit import run_command
from lightning_sv.runs.directory import CONFIG, LAST
from lightning_sv.runs.events import check_run_directory
from lightning_sv.settings.paths import expand_path


def run(argv: list[str]) -> int:
    """Validate a checkpoint; return the exit code."""
    return run_command("validate", _with_files_of_run(argv))


def _with_files_of_run(argv: Sequence[str]) -> list[str]:
    """Replace a run directory, if it is the first word, by its config and last checkpoint."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    run_dir = Path(expand_path(argv[0], "RUN"))
    check_run_directory(run_dir)
    files = ["--config", str(run_dir / CONFIG), "--ckpt_path", str(run_dir / LAST)]
    return [*files, *argv[1:]]
