"""`lightning-sv compare`: strategies in pairs with a baseline."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.compare import compare, default_out
from lightning_sv.experiments.run_store import RunStore, context_of
from lightning_sv.experiments.sources.from_cli import asked, compared_figure, one_budget
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.plain_parser import PlainParser, number


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `compare`, run it, show the result; return the exit code.

    Raises:
        ConfigError: what makes no comparison, or what `fit` would refuse
    """
    parser = PlainParser(
        "compare",
        "Train a baseline A and one or several other strategies on the same seeds and data order, and "
        "compare each of them with A in pairs. Arguments that are not listed here go to `fit` of every arm "
        "(--config, any key).",
        json="Print the figures as JSON on stdout.",
    )
    parser.add_argument("--baseline", "--a", dest="a", required=True, help="Strategy A, usually llama.")
    parser.add_argument("--arms", "--b", dest="b", required=True, nargs="+", help="Strategies B, each compared with A.")
    parser.add_argument(
        "--seeds", type=number(int, 1, 1000), default=3, help="Number of seeds, each a run of every arm."
    )
    parser.add_argument("--a_args", default="", help='Arguments of A alone, e.g. "--model.backbone.init_std 0.03".')
    parser.add_argument("--b_args", default="", help="Arguments of every B, not of A.")
    parser.add_argument("--a_label", help="Name of A in table and chart; the strategy by default.")
    parser.add_argument("--b_label", nargs="+", help="Names of the B, one each, in their order.")
    parser.add_places("Directory, of its runs too; runs/compare/MODEL-DATA/A_vs_B_B... by default.")
    options, shared = parser.parse_known_args(argv)
    a = asked(options.a, options.a_args, options.a_label)
    labels = options.b_label or [None] * len(options.b)
    if len(labels) != len(options.b):
        raise ConfigError(f"--arms names {len(options.b)} strategies and --b_label {len(labels)}; give one label each.")
    others = [asked(scale, options.b_args, label) for scale, label in zip(options.b, labels, strict=True)]
    arms, budget, model, data = one_budget([a, *others], shared)
    figure = compared_figure(arms, shared, options.seeds)
    Console(stderr=True).print(budget, markup=False, highlight=False, soft_wrap=True)
    out = options.out or default_out(figure, model.backbone.name, data.corpus.dir)
    # a directory that is asked for has its runs in it; all others share theirs
    had = RunStore(out if options.out else out.parent, context_of(data), launcher)
    command = shlex.join(["lightning-sv", "compare", *argv])
    result = compare(figure, had, out, jobs=options.jobs, command=command)
    if options.json:
        print(result.to_json())
    else:
        result.print(Console())
    return 0
