"""`lightning-sv fit` and `validate`."""

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import with_corpus
from lightning_sv.errors import StoppedError
from lightning_sv.lit.run_arguments import check_run
from lightning_sv.settings.words import underscored


def run(argv: list[str], command: str = "fit") -> int:
    """Train, or validate a checkpoint; return the exit code."""
    words = underscored(argv)
    named = resolve_names([word for word in words if word != "--dry_run"])
    if command == "fit" and "--dry_run" in words:
        check_run(named.now)
        print(
            "Keys, values and model are valid. Corpus, callbacks and loggers are checked by a run."
        )
        return 0
    return _train(command, with_corpus(named))


def _train(command: str, words: list[str]) -> int:
    # importing Lightning takes seconds, which a dry run does not need
    from lightning_sv.lit.cli import PretrainCLI
    from lightning_sv.lit.signals import exit_code

    try:
        PretrainCLI(args=[command, *words])
    except StoppedError as stopped:
        return exit_code(stopped)
    return 0
