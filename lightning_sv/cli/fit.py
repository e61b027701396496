"""`lightning-sv fit` and `validate`."""

from lightning_sv.errors import StoppedError
from lightning_sv.lit.cli import PretrainCLI
from lightning_sv.lit.distributed import exit_code


def run(argv: list[str], command: str = "fit") -> int:
    """Train, or validate a checkpoint; return the exit code."""
    try:
        PretrainCLI(args=[command, *argv])
    except StoppedError as stopped:
        return exit_code(stopped)
    return 0
