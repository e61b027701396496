"""`lightning-sv compare`: strategies compared with a baseline in pairs."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import prepare_for_run
from lightning_sv.experiments.compare import compare, output_of, print_comparison
from lightning_sv.experiments.sources.from_cli import (
    check_data,
    checked_data,
    compared_figure,
    parse_arm,
    request_arms,
    tokens_sentence,
)
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.plain_parser import PlainParser, number


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `compare`, train, print the result; return the exit code."""
    options, rest = _parser().parse_known_args(argv)
    named = resolve_names(rest)
    specs = [parse_arm(options.baseline, options.a_args, options.a_label)]
    specs += [parse_arm(scale, options.b_args) for scale in options.arms]
    prepare_for_run(named, lambda words: checked_data(specs, words, {}))
    arms = request_arms(specs, named.words, {})
    check_data(arms)
    figure = compared_figure(arms, options.seeds)

    progress = Console(stderr=True)
    progress.print(tokens_sentence(arms), markup=False, highlight=False, soft_wrap=True)
    out, store = output_of(figure, arms[0].run, "compare", options.out, launcher)
    command = shlex.join(["lightning-sv", "compare", *argv])
    result = compare(figure, store, out, jobs=options.jobs, console=progress, command=command)
    print_comparison(Console(), result, out)
    return 0


def _parser() -> PlainParser:
    text = (
        "Compare strategies with a baseline A in pairs of runs with the same seed and data order. "
        "Other arguments are passed to `fit` of each arm: --model NAME, --config FILE, any key."
    )
    parser = PlainParser("compare", text)
    parser.add_argument("--baseline", required=True, help="Strategy A, usually llama.")
    parser.add_argument(
        "--arms", required=True, nargs="+", help="Strategies B, each compared with A."
    )
    parser.add_argument(
        "--seeds", type=number(int, 1, 1000), default=3, help="Runs per arm, on seeds 0, 1, ..."
    )
    parser.add_argument(
        "--a_args", default="", help='Arguments of A only, e.g. "--model.backbone.init_std 0.03".'
    )
    parser.add_argument("--b_args", default="", help="Arguments of the strategies B only.")
    parser.add_argument("--a_label", help="Name of A in tables and plots; the strategy by default.")
    parser.add_places(
        "Output directory, also for runs; runs/compare/MODEL-DATA/A_vs_B_B... by default."
    )
    return parser
