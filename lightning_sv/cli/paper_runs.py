"""Table of the runs of figures, with the time that a budget estimates for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.experiments.arms import RunRequest
from lightning_sv.experiments.kinds.base import PlannedPanel
from lightning_sv.experiments.resolver import MFU
from lightning_sv.experiments.results import PlannedFigure, requests_of
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import Budget


def print_runs(
    console: Console,
    figures: Sequence[PlannedFigure],
    runs: RunStore,
    budget: Budget,
    parallel: int,
) -> None:
    """Print all runs, and the time of each figure and of all together.

    Args:
        console: console of the table
        figures: figures whose runs are listed
        runs: runs that exist
        budget: estimates of the time
        parallel: runs that are trained at a time
    """

    def print_line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    time = TimeEstimate(budget, parallel)
    total = requests_of(figures)
    of_any_context = replace(runs, context=None)  # the table refuses no run
    unfinished = {job.name for job in of_any_context.missing(total)}
    missing = [request for request in total if request.name in unfinished]
    machine = f"; {budget.gpu}, {MFU:.0%} MFU" if budget.gpu else ""
    print_line(f"budget {budget.name}: {budget.summary}{machine}")
    console.print(_run_table(total, unfinished, time))
    for figure in figures:
        requests = figure.requests()
        print_line(f"{figure.spec.name:20} {len(requests):3} runs, alone {time.text(requests)}")
        for panel in figure.panels:
            for sentence in _panel_sentences(panel):
                print_line(f"{'':20} {sentence}")
    together = f"{len(total)} runs, {time.text(total)}"
    print_line(f"together: {together}; missing: {len(missing)} runs, {time.text(missing)}.")
    print_line("The paper trains with 100 tokens per parameter.")


@dataclass(frozen=True)
class TimeEstimate:
    """Time of runs under a budget, of which several are trained at a time."""

    budget: Budget
    parallel: int

    @property
    def unit(self) -> str:
        """Unit of `RunSpec.cost`."""
        return "seconds" if self.budget.gpu is None else "GPU-hours"

    @property
    def decimals(self) -> int:
        """Decimals of the cost of one run."""
        return 0 if self.budget.gpu is None else 1

    def cost(self, requests: Sequence[RunRequest]) -> float:
        """Return the time of all runs, one at a time, in `unit`."""
        return sum(request.run_spec.cost for request in requests)

    def text(self, requests: Sequence[RunRequest]) -> str:
        """Return the time of all runs as text."""
        cost = self.cost(requests)
        if self.budget.gpu is not None:
            return f"{cost:,.1f} GPU-hours"
        return f"about {cost / 60 / self.parallel:,.0f} min, {self.parallel} at a time"


def _run_table(requests: Sequence[RunRequest], unfinished: set[str], time: TimeEstimate) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")  # it has the width that the numbers leave
    cost = f"{time.unit}\nper run"
    for column in ("steps", "tokens", "tokens per\nparameter", "epochs", cost, "runs", "done"):
        table.add_column(column, justify="right", no_wrap=True)

    by_configuration: dict[str, list[RunRequest]] = {}
    for request in requests:
        by_configuration.setdefault(request.run_spec.identity, []).append(request)
    for seeds in sorted(by_configuration.values(), key=_order):
        table.add_row(*_run_cells(seeds, unfinished, time))
    return table


def _order(requests: Sequence[RunRequest]) -> tuple[str, str, int]:
    run_spec = requests[0].run_spec
    return run_spec.model, run_spec.strategy, run_spec.steps


def _run_cells(
    requests: Sequence[RunRequest], unfinished: set[str], time: TimeEstimate
) -> list[str]:
    """Return one row: runs of one configuration, which differ in their seeds."""
    run_spec = requests[0].run_spec
    done = [request for request in requests if request.name not in unfinished]
    return [
        escape(f"{run_spec.model}, {run_spec.strategy}, {run_spec.details}"),
        f"{run_spec.steps:,}",
        f"{run_spec.tokens:,}",
        f"{run_spec.tokens_per_param:.1f}",
        "" if run_spec.epochs is None else f"{run_spec.epochs:.2f}",
        f"{time.cost(requests[:1]):,.{time.decimals}f}",
        str(len(requests)),
        str(len(done)),
    ]


def _panel_sentences(panel: PlannedPanel) -> list[str]:
    sentences = list(panel.warnings)
    if panel.why_not is not None:
        sentences.insert(0, f"{panel.title}: not testable here: {panel.why_not}")
    return sentences
