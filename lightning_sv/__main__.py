"""The command `lightning-sv` (also `python -m lightning_sv`).

Exit codes: 0 done, 1 a check or a run failed, 2 wrong input. Stopped: 130 by Ctrl-C, `fit` 143 by SIGTERM or SIGUSR1
(0 where SLURM queues it again), in training after the step under way, with a checkpoint.
"""

import atexit
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

COMMANDS = {
    "fit": "train a model (LightningCLI: --config, any key, --print_config, --ckpt_path)",
    "validate": "validation loss of a checkpoint (LightningCLI)",
    "prepare": "text -> tokens -> shards",
    "params": "parameter ledger of a model by role, beside the paper's figures",
    "plan": "memory, hours, checkpoint and data of a run on so many GPUs, before it is started",
    "compare": "train strategies in pairs with a baseline and compare them",
    "paper": "the paper's figures at a scale: missing runs, verdicts on its claims, a report",
    "report": "draw your own runs from their event files: one page, pictures, CSV",
    "generate": "continue a prompt with a trained model",
    "theory": "check the paper's theorems, with the counterexamples beyond them",
}

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
    commands: dict[str, Callable[[list[str]], int]] = {
        "prepare": _prepare,
        "params": _params,
        "plan": _plan,
        "compare": _compare,
        "paper": _paper,
        "report": _report,
        "generate": _generate,
        "theory": _theory,
    }
    try:
        if name in ("fit", "validate"):
            return _fit([name, *rest])
        if name not in commands:
            raise ValueError(f"unknown command {name!r}; known: {' '.join(COMMANDS)}")
        return commands[name](rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError, ModuleNotFoundError) as error:
        if "--traceback" in argv:
            raise
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


def _fit(argv: list[str]) -> int:
    from contextlib import ExitStack

    from lightning_sv.lit.cli import PretrainCLI
    from lightning_sv.lit.load import while_restoring
    from lightning_sv.lit.run_dir import leave_group, rank
    from lightning_sv.lit.signals import StoppedError, requeue
    from lightning_sv.plan import fitting_micro_batch
    from lightning_sv.settings.trainer import quiet

    quiet()
    atexit.register(leave_group)
    try:
        with ExitStack() as cleanup:
            run = PretrainCLI(argv, cleanup, fitting_micro_batch)
    except StoppedError as stopped:
        return 0 if stopped.requeue and (rank() or requeue()) else stopped.code
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if any(word.startswith("--ckpt_path") for word in argv) and while_restoring(error):
            why = " ".join(str(error).split())
            raise ValueError(f"the checkpoint cannot be resumed ({type(error).__name__}: {why}).") from error
        raise
    if run.summary is not None:
        from rich.console import Console

        from lightning_sv.analysis.run_plot import draw_run
        from lightning_sv.lit.summary import print_summary
        from lightning_sv.runs.events import read_run

        draw_run(read_run(run.run_dir), run.run_dir / "run.png")
        if run.json:
            print(json.dumps({"run_dir": str(run.run_dir), **run.summary}, indent=2))
        else:
            print_summary(Console(), run.summary, run.run_dir)
    return 0


def _prepare(argv: list[str]) -> int:
    from lightning_sv.corpus import CorpusConfig, prepare
    from lightning_sv.settings.parser import Parser

    parser = Parser(prog="lightning-sv prepare", description="Text to tokens to shards.", parser_mode="omegaconf+")
    parser.add_argument("--config", action="config", help="YAML with data.corpus; repeatable.")
    parser.add_class_arguments(CorpusConfig, "data.corpus")
    parser.add_argument("--json", action="store_true", help="Print the manifest as JSON.")
    config = parser.parse_args(argv)
    manifest = prepare(parser.instantiate(config).data.corpus, progress=not config.json)
    train, val = manifest.train, manifest.val
    if config.json:
        print(json.dumps({"dir": config.data.corpus.dir, **manifest.to_dict()}, indent=2))
    else:
        print(
            f"{config.data.corpus.dir}: {train.tokens:,} training and {val.tokens:,} validation tokens of "
            f"{train.documents + val.documents:,} documents ({manifest.duplicates:,} duplicates dropped), "
            f"tokenizer {manifest.tokenizer}, corpus {manifest.corpus_hash[:12]}"
        )
    return 0


def _params(argv: list[str]) -> int:
    from rich.console import Console

    from lightning_sv.nn import BackboneConfig
    from lightning_sv.plan.parameters import ledger
    from lightning_sv.scale import ScaleOptions
    from lightning_sv.settings.parser import RUN_KEYS, Parser

    parser = Parser(prog="lightning-sv params", description="Parameters by role.", parser_mode="omegaconf+")
    parser.add_argument("--config", action="config", help="YAML of a model or of a run; repeatable.")
    parser.add_class_arguments(BackboneConfig, "model.backbone")
    parser.add_argument("--model.scale", type=str, default="llama", help="Scale-vector strategy.")
    parser.add_class_arguments(ScaleOptions, "model.scale_options")
    for key in ("optim", "schedule"):
        parser.add_argument(f"--model.{key}", type=dict, help="Not used here.")
    unused = "tokens_per_param mask_documents compile activation_checkpointing residual nonfinite seed"
    ignored = [f"model.{key}" for key in unused.split()]
    ignored += ["data", "trainer", "scalars", "branch_norms", "experts", "batch_hash", "checkpoint", "progress"]
    for key in [*ignored, "seed_everything", *(key for key in RUN_KEYS if key != "json")]:
        parser.add_argument(f"--{key}", type=Any, help="Not used here.")
    parser.add_argument("--json", nargs="?", type=bool, const=True, default=False, help="Print JSON.")
    config = parser.parse_args(argv)
    made = parser.instantiate(config)
    book = ledger(made.model.backbone, config.model.scale, made.model.scale_options)
    if config.json:
        print(json.dumps(book.to_dict(), indent=2))
    else:
        book.print(Console())
    return 0


def _plan(argv: list[str]) -> int:
    from lightning_sv.plan.command import run_plan
    from lightning_sv.runs.events import read_run

    return run_plan(argv, lambda run: read_run(run, complete=False).curve("throughput/mfu"))


def _compare(argv: list[str]) -> int:
    from lightning_sv.experiments.command import run_compare

    return run_compare(argv)


def _paper(argv: list[str]) -> int:
    from lightning_sv.experiments.paper_command import run_paper

    return run_paper(argv)


def _report(argv: list[str]) -> int:
    from lightning_sv.experiments.report_command import run_report

    return run_report(argv)


def _theory(argv: list[str]) -> int:
    from lightning_sv.theory.command import run_theory

    return run_theory(argv)


def _generate(argv: list[str]) -> int:
    from pathlib import Path

    from lightning_sv.corpus import Tokenizer
    from lightning_sv.lit.generate import generate
    from lightning_sv.lit.load import load_backbone
    from lightning_sv.runs.events import read_run
    from lightning_sv.settings.words import Words

    parser = Words(prog="lightning-sv generate", description="Continue a prompt.")
    parser.add_argument("run", help="A run directory.")
    parser.add_argument("--prompt", default="", help="Text to continue; empty starts a document.")
    parser.add_argument("--tokens", type=int, default=120, help="Tokens to sample at most.")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token.")
    parser.add_argument("--top_k", type=int, default=50, help="Sample among this many tokens.")
    parser.add_argument("--seed", type=int, default=0, help="Of the sampling.")
    parser.add_argument("--allow", nargs="+", default=[], metavar="MODULE", help="Modules its strategy may import.")
    parser.add_argument("--json", action="store_true", help="Print prompt and continuation as JSON.")
    options = parser.parse_args(argv)
    directory = Path(options.run)
    run = read_run(directory, complete=False)
    model = load_backbone(str(directory / "checkpoints" / "last.ckpt"), options.allow)
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and the model {model.config.vocab_size}; "
            "they are not of one run."
        )
    ids = [tokenizer.eot, *tokenizer.encode(options.prompt)]
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
    out = generate(model, ids, options.tokens, context=run.seq_len, eot=tokenizer.eot, **sampling)
    text = tokenizer.decode(out)
    print(json.dumps({"prompt": options.prompt, "text": text}) if options.json else options.prompt + text)
    return 0


if __name__ == "__main__":
    cli()
