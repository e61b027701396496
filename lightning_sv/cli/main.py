"""The command `lightning-sv` (also `python -m lightning_sv`).

Exit codes: 0 done, 1 a check or a run failed, 2 wrong input. Stopped: 130 by Ctrl-C, `fit` 143 by SIGTERM or SIGUSR1
(0 where SLURM queues it again), in training after the step under way, with a checkpoint.
"""

import errno
import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS = {
    "fit": "train a model (LightningCLI: --config, any key, --print_config, --ckpt_path)",
    "validate": "validation loss of a checkpoint (LightningCLI)",
    "prepare": "text -> tokens -> shards",
    "params": "parameter ledger of a model by role, beside the paper's figures",
    "plan": "memory, hours, checkpoint and data of a run on so many GPUs, before it is started",
    "compare": "train strategies in pairs with a baseline and compare them",
    "sweep": "train over a grid of learning rates and initial stds: the optimum, with its error",
    "paper": "the paper's figures on a budget: missing runs, verdicts on its claims, a report",
    "report": "draw your own runs from their event files: one page, pictures, CSV",
    "generate": "continue a prompt with a trained model",
    "export": "a run as a folder that transformers and inference engines load",
    "inspect": "what the scale vectors of a trained model look like: table, picture, JSON",
    "roles": "what each parameter of a transformers model is, and what your framework decays today",
    "theory": "check the paper's theorems, with the counterexamples beyond them",
}

#: commands that share the file of another
BESIDE = {"validate": "fit"}
#: a path that is not there, not of the right kind, or not to be written
_UNUSABLE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)

USAGE = "usage: lightning-sv COMMAND [--help] ...\n\n" + "\n".join(
    f"  {name:10} {text}" for name, text in COMMANDS.items()
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `args` without the program's name."""
    argv = list(sys.argv[1:] if args is None else args)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        from lightning_sv import __version__

        print(__version__)
        return 0
    try:
        if name not in COMMANDS:
            raise ValueError(f"unknown command {name!r}; known: {' '.join(COMMANDS)}")
        return _command(name)(rest)
    except ValueError as error:
        text = str(error)
        if "of the Union subtypes" in text:  # where a class is made, after its words were read
            from lightning_sv.settings.parser import fits_no_type

            text = fits_no_type(text)
        from lightning_sv.runs.directory import printable

        print(f"error: {printable(text)}", file=sys.stderr)  # it may quote a file of somebody else
        return 2
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        if "--traceback" in argv:
            raise
        if isinstance(error, OSError) and error.filename and error.errno in _UNUSABLE:
            print(f"error: {error.filename} cannot be used ({error.strerror}); name another.", file=sys.stderr)
            return 2
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning's word on the trainer's settings
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as end:
        # Lightning makes an exit with status 1 of a Ctrl-C.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, KeyboardInterrupt):
            raise
        print("interrupted.", file=sys.stderr)
        return 130


def cli() -> None:
    """Console-script entry point."""
    code = main()
    gc.freeze()  # at its end the interpreter would look through all that was imported: a second for nothing
    sys.exit(code)


def _command(name: str) -> Callable[[list[str]], int]:
    """Import the file of one command: the others' imports would take seconds."""
    module = import_module(f"lightning_sv.cli.{BESIDE.get(name, name)}")
    run: Callable[[list[str]], int] = getattr(module, name if name in BESIDE else "run")
    return run
