"""`lightning-sv fit` and `validate`."""

from lightning_sv.errors import StoppedError
from lightning_sv.lit.cli import PretrainCLI
from lightning_sv.lit.signals import exit_code


def run(argv: list[str]) -> int:
    """Train, draw `run.png`, show the figures; return the exit code."""
    return _run("fit", argv)


def validate(argv: list[str]) -> int:
    """Show the validation loss of a checkpoint; return the exit code."""
    return _run("validate", argv)


def _run(command: str, argv: list[str]) -> int:
    try:
        PretrainCLI(args=[command, *argv])
    except StoppedError as stopped:
        return exit_code(stopped)
    return 0
