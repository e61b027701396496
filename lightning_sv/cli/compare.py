"""`lightning-sv compare`: strategies trained in pairs with a baseline."""

import torch
from rich.console import Console

from lightning_sv import __version__
from lightning_sv.experiments.compare import compare
from lightning_sv.experiments.settle import make_arm, one_budget, refuse_equal, resolve
from lightning_sv.settings.words import Words


def run(argv: list[str]) -> int:
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
    a = make_arm(options.a, options.a_args, options.a_label)
    labels = options.b_label or [None] * len(options.b)
    if len(labels) != len(options.b):
        raise ValueError(f"--b names {len(options.b)} strategies and --b_label {len(labels)}; give one label each.")
    others = [make_arm(scale, options.b_args, label) for scale, label in zip(options.b, labels, strict=True)]
    runs = resolve([a, *others], shared)
    refuse_equal(runs)
    (a, *others), budget = one_budget(runs)
    Console(stderr=True).print(budget, markup=False, highlight=False, soft_wrap=True)
    context = {
        "corpus_hash": runs[0].data.manifest.corpus_hash,
        "torch": torch.__version__,
        "lightning_sv": __version__,
    }
    result = compare(
        a, others, seeds=range(options.seeds), args=shared, out=options.out, jobs=options.jobs, context=context
    )
    if options.json:
        print(result.to_json())
    else:
        result.print(Console())
    return 0
