"""`lightning-sv paper`: the figures of the paper under a budget, from missing runs to verdicts."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.cli.names import find_corpus
from lightning_sv.cli.prepare import prepare_named
from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import RunRequest
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.preflight import check_corpora, check_recorded_curves, check_trainable
from lightning_sv.experiments.report.claims import verdicts_json
from lightning_sv.experiments.report.folder import check_replaceable
from lightning_sv.experiments.report.results_csv import read_recorded
from lightning_sv.experiments.results import Figure, PlannedFigure, requests_of
from lightning_sv.experiments.run_spec import MFU, RunResolver
from lightning_sv.experiments.run_store import RunStore, context_of, train
from lightning_sv.experiments.spec import Budget, budget_names, figure_names, load_budget, load_figure
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.runs.job import LAUNCHER, array_script, submit
from lightning_sv.runs.launch import default_parallel
from lightning_sv.settings.paths import find_config
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.yaml_file import parse_overrides, read_leaves


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `paper`, train, evaluate and report; return the exit code."""
    text = "Train the experiments of the paper under a budget and evaluate its claims. "
    text += "Other arguments are keys of `fit` of each run, e.g. --data.corpus.dir DIR."
    parser = PlainParser("paper", text, json="Print the verdicts as JSON on stdout, and the rest on stderr.")
    parser.add_argument("--budget", default="cpu", help=f"One of: {' '.join(budget_names())}.")
    parser.add_argument("--fig", nargs="+", default=[], help=f"Some of: {' '.join(figure_names())}; all by default.")
    parser.add_places("Output directory; runs/paper/BUDGET by default.")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--dry_run", action="store_true", help="List runs, steps, tokens per parameter and time.")
    ways.add_argument("--no_train", action="store_true", help="Evaluate existing runs only.")
    ways.add_argument("--slurm", action="store_true", help="Print the missing runs as one sbatch array.")
    parser.add_argument("--submit", action="store_true", help="With --slurm: submit the array.")
    recordings = "Folders or CSV files of recorded runs, which replace missing runs, e.g. results/cpu."
    parser.add_argument("--results_from", nargs="+", type=Path, default=[], metavar="PATH", help=recordings)
    options, rest = parser.parse_known_args(argv)
    judging = "neither --dry_run nor --slurm, which print no verdicts."
    expect(not (options.json and (options.dry_run or options.slurm)), "paper: --json", "set", judging)
    expect(options.slurm or not options.submit, "--submit", "set without --slurm", "both. Add --slurm.")
    budget = load_budget(options.budget)
    resolver = RunResolver(budget, _keys(rest))
    names = dict.fromkeys(options.fig or budget.figures or figure_names())
    figures = [plan_figure(load_figure(name), resolver) for name in names]
    is_training = not (options.dry_run or options.no_train)
    if is_training and options.fig:
        check_trainable(figures)
    out: Path = options.out or Path("runs/paper", budget.name)
    parallel = options.jobs or default_parallel()
    console = Console(width=None if sys.stdout.isatty() else 150, stderr=options.json)
    if options.dry_run:
        runs = RunStore(out, None, recorded=read_recorded(options.results_from))
        print_dry_run(console, figures, runs, budget, parallel)
        return 0
    wanted = requests_of(figures)
    if is_training:
        _prepare_corpora(budget, _keys(rest))
        check_corpora(figures)
    context = None if options.no_train else context_of(parse_run(list(wanted[0][0].args))[1]) if wanted else {}
    recorded = read_recorded(options.results_from, (context or {}).get("corpus_hash"))
    runs = RunStore(out, context, launcher, recorded)
    if is_training and runs.missing(wanted):
        check_recorded_curves(figures, runs)
    if options.slurm:
        print_dry_run(Console(stderr=True, width=console.width), figures, runs, budget, parallel)
        return _slurm(console, figures, runs, budget, options.submit)
    if options.no_train and not any(runs.is_recorded(*run) or runs.dir(*run).is_dir() for run in wanted):
        raise ConfigError(f"paper: {out} has no run of these figures. Remove --no_train, or set --out to their folder.")
    check_replaceable(out, [out / "runs"])
    failed: dict[str, str] = {}
    if not options.no_train:
        if budget.gpu is not None:
            print_dry_run(console, figures, runs, budget, parallel)
        failed = train(figures, runs, parallel=parallel, console=Console(stderr=True))
    words = ["lightning-sv", "paper", "--budget", budget.name, *rest]
    words += ["--out", str(out)] * (options.out is not None)
    words += ["--results_from", *map(str, options.results_from)] * bool(options.results_from)
    found = [replace(f, command=shlex.join([*words, "--fig", f.spec.name])) for f in evaluate(figures, runs)]
    print_verdicts(console, found)
    from lightning_sv.experiments.report.write import write_report  # it imports matplotlib

    write_report(found, out, f"{budget.name}: {budget.summary}", budget.caution)
    console.print(f"report: {out / 'report.html'}", markup=False)
    if options.json:
        print(verdicts_json(found, out / "report.html", failed=failed))
    return 1 if failed else 0


def _prepare_corpora(budget: Budget, keys: Mapping[str, Any]) -> None:
    """Prepare the corpora of a budget, except those of the Hugging Face hub (terabytes) and replaced ones."""
    if "data.corpus.dir" in keys:
        return
    for layer in budget.layers:
        kind, _, name = layer.partition("/")
        if kind != "data":
            continue
        source = str(read_leaves(find_config(kind, name)).get("data.corpus.source", ""))
        if not source.startswith("hf:"):
            prepare_named(find_corpus(name))


def print_verdicts(console: Console, figures: Sequence[Figure]) -> None:
    """Print each claim with its verdict, per figure."""
    for figure in figures:
        budget = f", {figure.ratio()} tokens per parameter (the paper: {figure.spec.paper_tokens_per_param})"
        title = figure.spec.title + (budget if figure.ratio() else "")
        table = Table("claim", "verdict", "paper", title=escape(title), title_justify="left", show_lines=True)
        for verdict in figure.verdicts:
            gone = f" Corrected: {verdict.corrected}." if verdict.corrected != verdict.verdict else ""
            table.add_row(escape(figure.claim(verdict)), escape(verdict.sentence + gone), escape(verdict.paper))
        console.print(table if figure.verdicts else escape(title))
        for warning in figure.warnings:
            console.print(f"warning: {warning}", markup=False, style="yellow")


def _keys(rest: list[str]) -> dict[str, Any]:
    """Parse `--key value` or `--key=value`, keys of all runs."""
    files, keys = parse_overrides(rest, "paper")
    if files or not all("." in key for key in keys):
        raise ConfigError(f"paper: {' '.join(rest)} is neither an option nor a key of fit, e.g. --data.corpus.dir DIR.")
    if "model.scale" in keys:
        raise ConfigError("paper: --model.scale is set by the arms of each figure; use compare for other strategies.")
    return keys


def print_dry_run(
    console: Console, figures: Sequence[PlannedFigure], runs: RunStore, budget: Budget, parallel: int
) -> None:
    """Print all runs, and the time of each figure and of all together, as the budget estimates it."""
    on_cpu, total = budget.gpu is None, requests_of(figures)
    missing = {job.name for job in replace(runs, context=None).missing(total)}

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def cost(wanted: Sequence[RunRequest]) -> float:
        return sum(run_spec.cost + budget.startup_seconds for run_spec, _ in wanted)

    def time_of(wanted: Sequence[RunRequest]) -> str:
        if not on_cpu:
            return f"{cost(wanted):,.1f} GPU-hours"
        return f"about {cost(wanted) / 60 / parallel:,.0f} min, {parallel} at a time"

    say(f"budget {budget.name}: {budget.summary}{f'; {budget.gpu}, {MFU:.0%} MFU' if budget.gpu else ''}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")  # it has the width that the numbers leave
    unit = "seconds" if on_cpu else "GPU-hours"
    for column in ("steps", "tokens", "tokens per\nparameter", "epochs", f"{unit}\nper run", "runs", "done"):
        table.add_column(column, justify="right", no_wrap=True)
    alike: dict[str, list[RunRequest]] = {}
    for run_spec, seed in total:
        alike.setdefault(run_spec.identity, []).append((run_spec, seed))
    for requests in sorted(alike.values(), key=lambda each: (each[0][0].model, each[0][0].strategy, each[0][0].steps)):
        run_spec, _ = requests[0]
        table.add_row(
            escape(f"{run_spec.model}, {run_spec.strategy}, {run_spec.details}"),
            f"{run_spec.steps:,}",
            f"{run_spec.tokens:,}",
            f"{run_spec.tokens_per_param:.1f}",
            "" if run_spec.epochs is None else f"{run_spec.epochs:.2f}",
            f"{cost(requests[:1]):,.{0 if on_cpu else 1}f}",
            str(len(requests)),
            str(sum(made.key(seed) not in missing for made, seed in requests)),
        )
    console.print(table)
    for figure in figures:
        alone = figure.requests()
        say(f"{figure.spec.name:20} {len(alone):3} runs, alone {time_of(alone)}")
        for panel in figure.panels:
            why_not = [] if panel.why_not is None else [f"{panel.title}: not testable here: {panel.why_not}"]
            for text in (*why_not, *panel.warnings):
                say(f"{'':20} {text}")
    left = [(run_spec, seed) for run_spec, seed in total if run_spec.key(seed) in missing]
    say(f"together: {len(total)} runs, {time_of(total)}; missing: {len(left)} runs, {time_of(left)}.")
    say("The paper trains with 100 tokens per parameter.")


def _slurm(console: Console, figures: Sequence[PlannedFigure], runs: RunStore, budget: Budget, submitted: bool) -> int:
    missing = runs.missing(requests_of(figures))
    if not missing:
        console.print("all runs are complete; call without --slurm for the verdicts.")
        return 0
    for job in missing:
        job.prepare()
    script = runs.out / "slurm.sh"
    text = array_script(missing, f"paper-{budget.name}", budget.sbatch)
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    print(text)
    if submitted:
        console.print(submit(script), markup=False)
    return 0
