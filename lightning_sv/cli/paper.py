"""`lightning-sv paper`: the figures of the paper under a budget, from missing runs to verdicts."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.cli.names import find_corpus
from lightning_sv.cli.paper_runs import print_runs
from lightning_sv.cli.prepare import prepare_named
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.preflight import (
    check_corpora,
    check_recorded,
    check_trainable,
)
from lightning_sv.experiments.report.folder import HTML, check_replaceable
from lightning_sv.experiments.report.results_csv import read_recorded
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import (
    Figure,
    PlannedFigure,
    requests_of,
    runs_of_figures,
    tokens_per_param_text,
)
from lightning_sv.experiments.run_store import RunStore, context_of, train_missing
from lightning_sv.experiments.spec import (
    Budget,
    budget_names,
    figure_names,
    load_budget,
    load_figure,
)
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.runs.launch import default_parallel
from lightning_sv.runs.slurm import array_script
from lightning_sv.settings.overrides import parse_overrides
from lightning_sv.settings.paths import find_config
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.yaml_file import read_leaves


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `paper`, train, evaluate and report; return the exit code."""
    options, words = _parser().parse_known_args(argv)
    budget = load_budget(options.budget)
    keys = _keys(words)
    figures = _plan_figures(options.fig, budget, keys)
    command = PaperCommand(budget, figures, options, words, launcher)
    if options.dry_run:
        return command.list_runs()
    if options.no_train:
        return command.judge()

    if options.fig:
        check_trainable(figures)
    _prepare_corpora(budget, keys)
    check_corpora(figures)
    if options.slurm:
        return command.write_array()
    return command.train()


def _plan_figures(
    names: Sequence[str], budget: Budget, keys: Mapping[str, Any]
) -> list[PlannedFigure]:
    """Plan the named figures, or else all figures of the budget."""
    resolver = RunResolver(budget, keys)
    figures = dict.fromkeys(names or budget.figures or figure_names())
    return [plan_figure(load_figure(name), resolver) for name in figures]


def _parser() -> PlainParser:
    text = (
        "Train the experiments of the paper under a budget and evaluate its claims. "
        "Other arguments are keys of `fit` of each run, e.g. --data.corpus.dir DIR."
    )
    parser = PlainParser("paper", text)
    parser.add_argument("--budget", default="cpu", help=f"One of: {' '.join(budget_names())}.")
    figures = f"Some of: {' '.join(figure_names())}; those of the budget by default."
    parser.add_argument("--fig", nargs="+", default=[], help=figures)
    parser.add_places("Output directory; runs/paper/BUDGET by default.")
    ways = parser.add_mutually_exclusive_group()
    plan = "List runs, steps, tokens per parameter and time."
    ways.add_argument("--dry_run", action="store_true", help=plan)
    ways.add_argument("--no_train", action="store_true", help="Evaluate existing runs only.")
    array = "Write the missing runs as one sbatch array, slurm.sh in the output directory."
    ways.add_argument("--slurm", action="store_true", help=array)
    recordings = (
        "Folders or CSV files of recorded runs, which replace missing runs, e.g. results/cpu."
    )
    parser.add_argument(
        "--results_from", nargs="+", type=Path, default=[], metavar="PATH", help=recordings
    )
    return parser


def _keys(words: list[str]) -> dict[str, Any]:
    """Parse `--key value` or `--key=value`, keys of all runs."""
    files, keys = parse_overrides(words, "paper")
    unknown = [f"--config {file}" for file in files]
    unknown += [f"--{key}" for key in keys if "." not in key]
    if unknown:
        expected = "neither an option nor a key of fit, e.g. --data.corpus.dir DIR"
        raise ConfigError(f"paper: {unknown[0]} is {expected}.")
    return keys


def _prepare_corpora(budget: Budget, keys: Mapping[str, Any]) -> None:
    """Prepare the corpora of a budget, unless the command line replaces them.

    Those of the Hugging Face hub have terabytes, and are not prepared.
    """
    if "data.corpus.dir" in keys:
        return
    for layer in budget.layers:
        kind, _, name = layer.partition("/")
        if kind != "data":
            continue
        source = str(read_leaves(find_config(kind, name)).get("data.corpus.source", ""))
        if not source.startswith("hf:"):
            prepare_named(find_corpus(name))


@dataclass(frozen=True)
class PaperCommand:
    """Figures under a budget, which the command lists, trains or judges.

    Attributes:
        options: options of the command
        words: further arguments, keys of all runs
        launcher: program of a run
    """

    budget: Budget
    figures: Sequence[PlannedFigure]
    options: Namespace
    words: Sequence[str]
    launcher: Sequence[str]

    @property
    def out(self) -> Path:
        """Output directory."""
        return self.options.out or Path("runs/paper", self.budget.name)

    @property
    def parallel(self) -> int:
        """Runs that are trained at a time."""
        return self.options.jobs or default_parallel()

    @property
    def console(self) -> Console:
        """Console of the verdicts."""
        width = None if sys.stdout.isatty() else 150
        return Console(width=width)

    def list_runs(self) -> int:
        """Print all runs and the time that they take; return the exit code."""
        self._print_runs(self.console, self._runs(None))
        return 0

    def judge(self) -> int:
        """Evaluate the runs that exist; return the exit code."""
        runs = self._runs(None)
        requests = requests_of(self.figures)
        has_run = any(runs.is_recorded(run) or runs.dir(run).is_dir() for run in requests)
        if not has_run:
            hint = "Remove --no_train, or set --out to their folder."
            raise ConfigError(f"paper: {self.out} has no run of these figures. {hint}")
        check_replaceable(self.out, [self.out / "runs"])
        return self._report(runs, failed={})

    def train(self) -> int:
        """Train the missing runs, and evaluate all; return the exit code."""
        runs = self._checked_runs()
        check_replaceable(self.out, [self.out / "runs"])  # before hours of training
        if self.budget.gpu is not None:
            self._print_runs(self.console, runs)
        progress = Console(stderr=True)
        failed = train_missing(self.figures, runs, parallel=self.parallel, console=progress)
        return self._report(runs, failed)

    def write_array(self) -> int:
        """Write the missing runs as an sbatch array; return the exit code."""
        runs = self._checked_runs()
        console = self.console
        self._print_runs(console, runs)
        missing = runs.missing(requests_of(self.figures))
        if not missing:
            console.print("all runs are complete; call without --slurm for the verdicts.")
            return 0
        for job in missing:
            job.prepare()
        script = runs.out / "slurm.sh"
        text = array_script(missing, f"paper-{self.budget.name}", self.budget.sbatch)
        script.write_text(text, encoding="utf-8")
        console.print(f"submit them with: sbatch {script}", markup=False, soft_wrap=True)
        return 0

    def _print_runs(self, console: Console, runs: RunStore) -> None:
        print_runs(console, self.figures, runs, self.budget, self.parallel)

    def _checked_runs(self) -> RunStore:
        """Return the runs, after checks of the recordings that replace some of them."""
        requests = requests_of(self.figures)
        context = {}
        if requests:
            args = list(requests[0].run_spec.args)
            context = context_of(parse_run(args).data)  # a budget has one corpus
        return self._runs(context)

    def _runs(self, context: Mapping[str, str] | None) -> RunStore:
        """Return the runs and their recordings; with None, those of any corpus and version."""
        paths = self.options.results_from
        recorded = read_recorded(paths, (context or {}).get("corpus_hash"))
        check_recorded(self.figures, recorded, paths)
        return RunStore(self.out, context, self.launcher, recorded)

    def _report(self, runs: RunStore, failed: Mapping[str, str]) -> int:
        """Print verdicts and write the report; return the exit code."""
        from lightning_sv.experiments.report.write import write_report  # it imports matplotlib

        figures = []
        for figure in evaluate(self.figures, runs):
            figures.append(replace(figure, command=self._command(figure.spec.name)))
        console = self.console
        print_verdicts(console, figures)
        title = f"{self.budget.name}: {self.budget.summary}"
        write_report(figures, self.out, title, self.budget.caution)
        console.print(f"report: {self.out / HTML}", markup=False)
        return 1 if failed else 0

    def _command(self, figure: str) -> str:
        """Return the command that repeats a figure."""
        words = ["lightning-sv", "paper", "--budget", self.budget.name, *self.words]
        if self.options.out is not None:
            words += ["--out", str(self.out)]
        if self.options.results_from:
            words += ["--results_from", *map(str, self.options.results_from)]
        return shlex.join([*words, "--fig", figure])


def print_verdicts(console: Console, figures: Sequence[Figure]) -> None:
    """Print each claim with its verdict, per figure."""
    for figure in figures:
        title = figure.spec.title
        per_param = tokens_per_param_text(runs_of_figures([figure]))
        if per_param:
            paper = figure.spec.paper_tokens_per_param
            title += f", {per_param} tokens per parameter (the paper: {paper})"
        console.print(_verdict_table(figure, title) if figure.verdicts else escape(title))
        for warning in figure.warnings:
            console.print(f"warning: {warning}", markup=False, style="yellow")


def _verdict_table(figure: Figure, title: str) -> Table:
    columns = ("claim", "verdict", "paper")
    table = Table(*columns, title=escape(title), title_justify="left", show_lines=True)
    for verdict in figure.verdicts:
        sentence = verdict.sentence
        if verdict.corrected != verdict.verdict:
            sentence += f" Corrected: {verdict.corrected}."
        table.add_row(escape(figure.statement(verdict)), escape(sentence), escape(verdict.paper))
    return table
