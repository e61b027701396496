"""The command `lightning-sv` (also `python -m lightning_sv`).

Exit codes: 0 success, 1 a check or a run failed, 2 wrong input, 130 Ctrl-C, 141 the reader of the
output ended. On a signal `fit` stops after the current step, with a checkpoint: 129 for SIGHUP, 143
for SIGTERM or SIGUSR1 (0 if SLURM requeues the job).
"""

import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.log import level_of, start_logging, without_levels
from lightning_sv.runs.output import discard, message_of

log = logging.getLogger(__name__)

COMMANDS = {
    "fit": "train a model: --model NAME or --config FILE, and any key of its config",
    "validate": "validation loss of a run or of a checkpoint",
    "prepare": "convert text to tokens and shards",
    "params": "count the parameters of a model by role, next to the paper's numbers",
    "plan": "estimate memory, hours, checkpoint size and data of a run",
    "compare": "train strategies in pairs with a baseline and compare them",
    "sweep": "train on a grid of learning rates and initial stds, and fit the optimum",
    "paper": "train the runs of the paper's figures, evaluate its claims, write a report",
    "presets": "list the names that --model, --data, other options and --config take",
    "runs": "list runs: data, strategy, rate, steps, loss",
    "report": "draw your own runs: a page, pictures, CSV",
    "generate": "continue a prompt with a trained model",
    "export": "write a run as a folder for transformers and inference engines",
    "inspect": "statistics of the scale vectors of a trained model: table, picture, JSON",
    "theory": "check the paper's theorems and their counterexamples",
}

#: names of commands in other programs -> ours
USUAL_NAMES = {
    **dict.fromkeys(("train", "pretrain", "run"), "fit"),
    **dict.fromkeys(("eval", "evaluate", "test"), "validate"),
    **dict.fromkeys(("data", "tokenize", "preprocess"), "prepare"),
    **dict.fromkeys(("sample", "predict"), "generate"),
    "convert": "export",
    "ls": "runs",
}
#: exit code if the reader of the output has ended, as for SIGPIPE
UNREAD = 128 + 13
#: Lightning imports matplotlib, which would fail on a wrong user setting. No setting changes our
#: pictures.
_MATPLOTLIB = {"MATPLOTLIBRC": os.devnull, "MPLBACKEND": "agg"}

USAGE = (
    "usage: lightning-sv COMMAND [--help] [--quiet | --verbose] [--traceback] ...\n\n"
    + "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command with `args`, without the program's name, and return its exit code."""
    _escape_unknown_characters()
    words = sys.argv[1:] if args is None else args
    argv = [word for word in without_levels(words) if word != "--traceback"]
    start_logging(level_of(words))
    try:
        return _run(argv)
    except Exception as error:
        return _report(error, with_traceback="--traceback" in words)
    except (KeyboardInterrupt, SystemExit) as end:
        return _interrupted(end)


def _escape_unknown_characters() -> None:
    """Escape characters that the terminal does not support."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Exception, *, with_traceback: bool) -> int:
    """Log an expected error and return its exit code; raise others again."""
    if isinstance(error, BrokenPipeError):
        return UNREAD
    expected = message_of(error)
    if expected is None:
        raise error
    if with_traceback:
        traceback.print_exc()
    message, code = expected
    log.error("%s", message)
    return code


def _interrupted(end: KeyboardInterrupt | SystemExit) -> int:
    """Return the exit code after Ctrl-C or the end of the reader; raise other exits again."""
    cause = end.__context__
    if isinstance(cause, BrokenPipeError):  # rich converts it to an exit
        return UNREAD
    is_ctrl_c = isinstance(end, KeyboardInterrupt) or isinstance(cause, KeyboardInterrupt)
    if not is_ctrl_c:  # Lightning converts a Ctrl-C to an exit with code 1
        raise end
    print("interrupted.", file=sys.stderr)
    return 130


def cli() -> None:
    """Run the command of the program's arguments and exit."""
    os.environ |= _MATPLOTLIB
    # OpenMP threads that wait spin this often before they sleep. Few spins leave the core to other
    # processes, many are faster on an idle machine: the table is in benchmarks/TRIED.md. Read when
    # torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    code = _flushed(_exit_code())
    ranks = sys.modules.get("lightning_sv.lit.distributed")
    if code and ranks is not None:
        ranks.end_at_once(code)
    gc.freeze()  # skip the final garbage collection, which takes a second
    sys.exit(code)


def _exit_code() -> Any:
    """Run the command; return its exit code, also after a bug."""
    try:
        return main()
    except SystemExit as end:  # from a parser, after --help
        return end.code
    except Exception:
        traceback.print_exc()
        return 1


def _flushed(code: Any) -> Any:
    """Flush stdout; return `code`, or that of a failed write."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        if code:
            return code
        if isinstance(error, BrokenPipeError):
            return UNREAD
        log.error("stdout cannot be written (%s).", error.strerror)
        return 1
    return code


def _run(argv: list[str]) -> int:
    if not argv:
        print(USAGE)
        return 2
    name, *rest = argv
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == "--version":
        from lightning_sv.version import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        raise ConfigError(unknown("command", name, COMMANDS, near=USUAL_NAMES.get(name)))
    return _command(name)(rest)


def _command(name: str) -> Callable[[list[str]], int]:
    """Import the file of one command only, because the imports of others would take seconds."""
    run: Callable[[list[str]], int] = import_module(f"lightning_sv.cli.{name}").run
    return run
