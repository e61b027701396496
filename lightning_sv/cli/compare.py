"""`lightning-sv compare`: strategies compared with a baseline in pairs."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import with_corpus
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.compare import compare, default_out, free_out, print_comparison
from lightning_sv.experiments.run_store import RunStore, context_of
from lightning_sv.experiments.sources.from_cli import asked, compared_figure, one_budget
from lightning_sv.experiments.sources.from_runs import COMPARISON
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.plain_parser import PlainParser, number


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `compare`, train, print the result; return the exit code."""
    text = "Compare strategies with a baseline A in pairs of runs with the same seed and data order. "
    text += "Other arguments are passed to `fit` of each arm (--config, any key)."
    parser = PlainParser("compare", text, json="Print the numbers as JSON on stdout.")
    parser.add_argument("--baseline", "--a", dest="a", required=True, help="Strategy A, usually llama.")
    parser.add_argument("--arms", "--b", dest="b", required=True, nargs="+", help="Strategies B, each compared with A.")
    parser.add_argument("--seeds", type=number(int, 1, 1000), default=3, help="Runs per arm, on seeds 0, 1, ...")
    parser.add_argument("--a_args", default="", help='Arguments of A only, e.g. "--model.backbone.init_std 0.03".')
    parser.add_argument("--b_args", default="", help="Arguments of the strategies B only.")
    parser.add_argument("--a_label", help="Name of A in tables and plots; the strategy by default.")
    parser.add_argument("--b_label", nargs="+", help="Names of the strategies B in tables and plots, in their order.")
    parser.add_places("Output directory, also for runs; runs/compare/MODEL-DATA/A_vs_B_B... by default.")
    options, rest = parser.parse_known_args(argv)
    shared = with_corpus(resolve_names(rest))
    a = asked(options.a, options.a_args, options.a_label)
    labels = options.b_label or [None] * len(options.b)
    if len(labels) != len(options.b):
        raise ConfigError(f"--b_label has {len(labels)} names; expected {len(options.b)}, one per strategy of --arms.")
    others = [asked(scale, options.b_args, label) for scale, label in zip(options.b, labels, strict=True)]
    arms, budget, model, data = one_budget([a, *others], shared)
    figure = compared_figure(arms, shared, options.seeds)
    progress = Console(stderr=True)
    progress.print(budget, markup=False, highlight=False, soft_wrap=True)
    default = default_out(figure, model.backbone.name, data.corpus.dir)
    # a directory set with --out has its own runs; default directories share theirs
    store = RunStore(options.out or default.parent, context_of(data), launcher)
    out = options.out or free_out(default, figure, store)
    command = shlex.join(["lightning-sv", "compare", *argv])
    result = compare(figure, store, out, jobs=options.jobs, console=progress, command=command)
    if options.json:
        print((out / COMPARISON).read_text(encoding="utf-8"), end="")
    else:
        print_comparison(Console(), result, out)
    return 0
