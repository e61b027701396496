"""`lightning-sv validate`: the validation loss of a checkpoint."""

from lightning_sv.cli.fit import run_command


def run(argv: list[str]) -> int:
    """Validate a checkpoint; return the exit code."""
    return run_command("validate", argv)
