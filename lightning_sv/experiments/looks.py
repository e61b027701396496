"""Training in looks: a panel that a few pairs decide gets no more, and the time goes to those that are open.

What a look costs is in the intervals (`results.Panel.confidence`): all looks together err as often as one would.
"""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console

from lightning_sv.analysis.decision import NOT_RESOLVED
from lightning_sv.experiments.dry_run import cost
from lightning_sv.experiments.judge import judge
from lightning_sv.experiments.recipe import by_seed
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.spec import Budget
from lightning_sv.experiments.train import train

#: of the intervals that are compared in width
_UNIT = "nats per token"
#: figure -> panel -> pairs of its look
_Looks = dict[str, dict[str, int]]


def train_by_looks(
    figures: Sequence[Figure], runs: Runs, budget: Budget, *, parallel: int | None, console: Console
) -> dict[str, str]:
    """Train what is missing, as `train`, up to each look of the budget; the same command again takes the same turns.

    A figure's first question comes first, then the widest interval that decides nothing.

    Args:
        figures: whose runs are wanted, with all pairs that the budget may spend
        runs: those that are there
        budget: its looks, and the time that further pairs may take
        parallel: runs at a time; None: see `default_parallel`
        console: where progress goes

    Returns:
        Key of a run that failed -> why; the others are trained all the same.

    Raises:
        ValueError: a directory holds a finished run of another command, corpus or version
        RuntimeError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped them all; finished runs are kept
    """
    runs.missing(by_seed(run for figure in figures for run in figure.runs()))  # says so before hours of others
    wanted = first_look(figures, budget)
    failed = train(wanted, runs, parallel=parallel, console=console)
    looks: _Looks = {figure.spec.name: {} for figure in figures}
    for before, n in pairwise([*budget.looks, budget.seeds]):
        asking = _open(judge(wanted, runs), before)
        chosen = 0
        for _, figure, panel in asking:
            more = looks | {figure: looks[figure] | {panel: n}}
            if _minutes(figures, more, budget) <= (budget.core_minutes or float("inf")):
                looks, chosen = more, chosen + 1
        console.print(
            f"after {before} pairs {len(asking)} panels have open claims; {chosen} of them get {n} pairs",
            markup=False,
        )
        wanted = _at(figures, looks, budget)
        failed = train(wanted, runs, parallel=parallel, console=console)
    return failed


def first_look(figures: Sequence[Figure], budget: Budget) -> list[Figure]:
    """The figures with the pairs that are trained in any case."""
    return _at(figures, {}, budget)


def _at(figures: Sequence[Figure], looks: _Looks, budget: Budget) -> list[Figure]:
    first = min([*budget.looks, budget.seeds])
    return [figure.upto(looks.get(figure.spec.name, {}), first) for figure in figures]


def _minutes(figures: Sequence[Figure], looks: _Looks, budget: Budget) -> float:
    return cost(by_seed(run for figure in _at(figures, looks, budget) for run in figure.runs()), budget) / 60


def _open(figures: Sequence[Figure], pairs: int) -> list[tuple[tuple[bool, float], str, str]]:
    """(rank, figure, panel) of those at a look with a claim that is not decided, in the order of their turns."""
    found = []
    for figure in figures:
        for panel in figure.panels:
            if panel.pairs == pairs and (rank := _rank(figure, panel)):
                found.append((rank, figure.spec.name, panel.title))
    return sorted(found, key=lambda each: each[0])


def _rank(figure: Figure, panel: Panel) -> tuple[bool, float] | None:
    """Whether the first question of the figure is decided, and minus the widest interval; None where all are."""
    claims = [v for v in figure.verdicts if v.panel == panel.title and v.verdict == NOT_RESOLVED]
    widths = [float("inf") if v.smallest is None else v.smallest for v in claims if v.unit == _UNIT]
    return (not any(v.primary for v in claims), -max(widths, default=0.0)) if claims else None
