"""`lightning-sv compare`: its arguments, and what is refused before an hour is spent."""

import shlex
import warnings
from collections.abc import Sequence
from itertools import combinations

import torch
from rich.console import Console

from lightning_sv import __version__
from lightning_sv.lit.cli import parse_run
from lightning_sv.lit.words import Words
from lightning_sv.paper.compare import compare
from lightning_sv.paper.pair import Arm


def run_compare(argv: list[str]) -> int:
    """Parse the arguments of `compare`, run it, show the result; return the exit code."""
    parser = Words(
        prog="lightning-sv compare",
        description="Train a baseline A and one or several other strategies on the same seeds and data order, and "
        "compare each of them with A in pairs. Arguments that are not listed here go to `fit` of every arm "
        "(--config, any key).",
    )
    parser.add_argument("--a", required=True, help="Strategy compared with, usually llama.")
    parser.add_argument("--b", required=True, nargs="+", help="Strategies in question, each compared with A.")
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds, each a run of every arm.")
    parser.add_argument("--a_args", default="", help='Arguments of A alone, e.g. "--model.backbone.init_std 0.03".')
    parser.add_argument("--b_args", default="", help="Arguments of every B, not of A.")
    parser.add_argument("--a_label", help="Name of A in table and chart; the strategy by default.")
    parser.add_argument("--b_label", nargs="+", help="Names of the B, one each, in their order.")
    parser.add_argument("--out", help="Directory; runs/compare/<A>_vs_<B>_<B>... by default.")
    parser.add_argument("--jobs", type=int, help="Runs at a time; one a core, four at most, by default.")
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON on stdout.")
    options, shared = parser.parse_known_args(argv)
    if options.seeds < 1:
        raise ValueError(f"--seeds is {options.seeds}; give the number of seeds, at least 1.")
    a = _arm(options.a, options.a_args, options.a_label)
    labels = options.b_label or [None] * len(options.b)
    if len(labels) != len(options.b):
        raise ValueError(f"--b names {len(options.b)} strategies and --b_label {len(labels)}; give one label each.")
    others = [_arm(scale, options.b_args, label) for scale, label in zip(options.b, labels, strict=True)]
    context = _refuse_equal([a, *others], shared)
    result = compare(
        a, others, seeds=range(options.seeds), args=shared, out=options.out, jobs=options.jobs, context=context
    )
    if options.json:
        print(result.to_json())
    else:
        result.print(Console())
    return 0


def _arm(scale: str, text: str, label: str | None) -> Arm:
    """Make an arm; its label is the strategy and what its own arguments change."""
    args = shlex.split(text)
    words = " ".join(args).replace("=", " ").split()
    changes = [f"{key.rpartition('.')[2]}={value}" for key, value in zip(words[::2], words[1::2], strict=False)]
    return Arm(label or ",".join([scale, *changes]), scale, tuple(args))


def _refuse_equal(arms: Sequence[Arm], shared: list[str]) -> dict[str, str]:
    """Refuse wrong arguments, and two strategies that are one model, before an hour is spent on them.

    Returns what the runs' results depend on beside their commands.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [parse_run([*shared, *arm.args, "--model.scale", arm.scale]) for arm in arms]
    meanings = [str(model.meaning) for model, *_ in runs]
    for (a, meaning), (b, other) in combinations(zip(arms, meanings, strict=True), 2):
        if a.args == b.args and meaning == other:
            raise ValueError(
                f"strategies {a.scale!r} and {b.scale!r} are the same model, {meaning!r}; compare two that differ."
            )
    return {
        "corpus_hash": runs[0][1].manifest.corpus_hash,
        "torch": torch.__version__,
        "lightning_sv": __version__,
    }
