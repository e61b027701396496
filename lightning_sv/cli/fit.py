"""`lightning-sv fit`: train a model."""

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import prepare_for_run
from lightning_sv.errors import StoppedError
from lightning_sv.lit.run_arguments import check_run
from lightning_sv.settings.words import underscored


def run(argv: list[str]) -> int:
    """Train; return the exit code."""
    return run_command("fit", argv)


def run_command(command: str, argv: list[str]) -> int:
    """Run LightningCLI's fit or validate, or check its arguments alone (--dry_run)."""
    words = underscored(argv)
    named = resolve_names([word for word in words if word != "--dry_run"])
    if _only_prints(words):
        return _start(command, named.parseable)
    if "--dry_run" not in words:
        prepare_for_run(named, lambda words: check_run(words).data)
        return _start(command, named.words)
    check_run(named.parseable)
    print("Keys, values and model are valid. Corpus, callbacks and loggers are checked by a run.")
    return 0


def _only_prints(words: list[str]) -> bool:
    """Return True if LightningCLI prints its help or its config, and trains nothing."""
    return any(word == "-h" or word.startswith(("--help", "--print_config")) for word in words)


def _start(command: str, words: list[str]) -> int:
    # importing Lightning takes seconds, which a dry run does not need
    from lightning_sv.lit.cli import PretrainCLI
    from lightning_sv.lit.signals import exit_code

    try:
        PretrainCLI(args=[command, *words])
    except StoppedError as stopped:
        return exit_code(stopped)
    return 0
