"""The command `lightning-sv` (also `python -m lightning_sv`).

Exit codes: 0 done, 1 a check or a run failed, 2 wrong input, 141 the output's reader has gone. Stopped: 130 by Ctrl-C,
`fit` 129 by SIGHUP, 143 by SIGTERM or SIGUSR1 (0 where SLURM queues it again), in training after the step under way,
with a checkpoint.
"""

import errno
import gc
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from lightning_sv.errors import ConfigError, RunError, unknown
from lightning_sv.log import LEVELS, start_logging
from lightning_sv.runs.output import LastingStream, discard, is_unread, lasting_output

log = logging.getLogger(__name__)

COMMANDS = {
    "fit": "train a model (LightningCLI: --config, any key, --print_config, --ckpt_path)",
    "validate": "validation loss of a checkpoint (LightningCLI)",
    "prepare": "text -> tokens -> shards",
    "params": "parameter ledger of a model by role, beside the paper's figures",
    "plan": "memory, hours, checkpoint and data of a run on so many GPUs, before it is started",
    "compare": "train strategies in pairs with a baseline and compare them",
    "sweep": "train over a grid of learning rates and initial stds: the optimum, with its error",
    "paper": "the paper's figures on a budget: missing runs, verdicts on its claims, a report",
    "runs": "list runs: data, strategy, rate, steps, loss",
    "report": "draw your own runs from their event files: one page, pictures, CSV",
    "generate": "continue a prompt with a trained model",
    "export": "a run as a folder that transformers and inference engines load",
    "inspect": "what the scale vectors of a trained model look like: table, picture, JSON",
    "roles": "what each parameter of a transformers model is, and what your framework decays today",
    "theory": "check the paper's theorems, with the counterexamples beyond them",
}

#: command that shares the file of another -> that one
FILE_OF = {"validate": "fit"}
#: commands that work for minutes or more: what becomes of their output does not end them
LASTING = ("fit", "prepare", "compare", "sweep", "paper")
#: exit status of a program whose reader has gone, as of any that SIGPIPE ends
UNREAD = 128 + 13
#: a path that does not exist, is not of the right kind, cannot be written, or cannot be a path
_UNUSABLE = (
    errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip

#: Lightning imports matplotlib, which a wrong setting of the user's would stop; no setting changes our pictures
_MATPLOTLIB = {"MATPLOTLIBRC": os.devnull, "MPLBACKEND": "agg"}

USAGE = "usage: lightning-sv COMMAND [--help] [--quiet | --verbose] [--traceback] ...\n\n" + "\n".join(
    f"  {name:10} {text}" for name, text in COMMANDS.items()
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `args` without the program's name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows the rest of the text
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if args is None else args)
    argv = [word for word in words if word not in ("--traceback", *LEVELS)]
    start_logging(next((LEVELS[word] for word in words if word in LEVELS), logging.INFO))
    # with --traceback the traceback of an error is printed above its sentence
    show = traceback.print_exc if "--traceback" in words else lambda: None
    try:
        return _run(argv)
    except ConfigError as error:
        from lightning_sv.runs.directory import printable

        show()
        log.error("%s", printable(str(error)))  # it may quote a file of somebody else
        return 2
    except (RunError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, BrokenPipeError) and is_unread(sys.stdout):
            return UNREAD
        show()
        if isinstance(error, OSError) and error.filename and error.errno in _UNUSABLE:
            log.error("%s cannot be used (%s); name another.", error.filename, error.strerror)
            return 2
        kind = "" if isinstance(error, RunError) else f"{type(error).__name__}: "
        log.error("%s%s", kind, error)
        return 1
    except Exception as error:
        text, code = str(error), 2
        if text.startswith("DataLoader worker (pid"):  # torch's signal handler raises it at any place
            code = 1
        elif (
            isinstance(error, RuntimeError) and "determine home directory" in text
        ):  # pathlib's, also for litdata's cache
            text = "HOME is not set; expected a folder for caches. Set it, e.g. HOME=/tmp."
        elif type(error).__name__ != "MisconfigurationException":  # Lightning's, about the trainer's settings
            raise
        show()
        log.error("%s", text)
        return code
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end.__context__, BrokenPipeError):  # of which rich makes an exit
            return UNREAD
        # Lightning makes an exit with status 1 of a Ctrl-C.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
            raise
        print("interrupted.", file=sys.stderr)
        return 130


def cli() -> None:
    """Console-script entry point."""
    os.environ |= _MATPLOTLIB
    if sys.stderr is not None:
        sys.stderr = LastingStream(sys.stderr, "stderr", None)  # type: ignore[assignment]
    try:
        code: Any = main()
    except SystemExit as end:  # of a parser, after --help
        code = end.code
    except Exception:
        traceback.print_exc()
        code = 1
    code = _flush(code)
    if code and (ranks := sys.modules.get("lightning_sv.lit.distributed")):
        ranks.end_at_once(code)
    gc.freeze()  # at its end the interpreter would look through all that was imported: a second for nothing
    sys.exit(code)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        from lightning_sv.version import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        raise ConfigError(unknown("command", name, COMMANDS))
    with lasting_output() if name in LASTING else nullcontext():
        return _command(name)(rest)


def _flush(code: Any) -> Any:
    """Write what stdout still holds, here, where an error is reported; return the exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        unread = isinstance(error, BrokenPipeError)
        if not (code or unread):
            log.error("stdout cannot be written (%s).", error.strerror)
        discard(sys.stdout)
        return code or (UNREAD if unread else 1)
    return code


def _command(name: str) -> Callable[[list[str]], int]:
    """Import the file of one command: the others' imports would take seconds."""
    run: Callable[..., int] = import_module(f"lightning_sv.cli.{FILE_OF.get(name, name)}").run
    return partial(run, command=name) if name in FILE_OF else run
