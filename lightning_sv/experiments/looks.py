"""Training in looks: a claim that a few pairs decide gets no more, and the time goes to those that are open.

What a look costs is in the intervals (`results.Panel.confidence`): all looks together err as often as one would.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rich.console import Console

from lightning_sv.analysis.decision import NOT_RESOLVED
from lightning_sv.experiments.dry_run import cost
from lightning_sv.experiments.judge import decide, judge
from lightning_sv.experiments.recipe import Wanted, by_seed
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.spec import Budget, ClaimSpec
from lightning_sv.experiments.train import train

#: of the claims that ask for time: those of other units are no wider or narrower
UNIT = "nats per token"


def train_by_looks(
    figures: Sequence[Figure], runs: Runs, budget: Budget, *, parallel: int | None, console: Console
) -> dict[str, str]:
    """Train what is missing, as `train`, up to each look of the budget; the same command again takes the same turns.

    Args:
        figures: whose runs are wanted, with all pairs that the budget may spend
        runs: those that are there
        budget: its looks, and the time that further pairs may take
        parallel: runs at a time; None: see `default_parallel`
        console: where progress goes

    Returns:
        Key of a run that failed -> why; the others are trained all the same.

    Raises:
        RuntimeError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped them all; finished runs are kept
    """
    looks = [*budget.looks, budget.seeds]
    pairs: dict[str, int] = {}
    failed = train(wanted := first_look(figures, budget), runs, parallel=parallel, console=console)
    for before, n in pairwise(looks):
        open_claims = sorted(_open(judge(wanted, runs)), key=lambda claim: -claim[0])
        chosen = 0
        for _, arms in open_claims:
            more = pairs | {arm: n for arm in arms if pairs.get(arm, looks[0]) == before}
            if _minutes(figures, more, budget) <= (budget.core_minutes or float("inf")):
                pairs, chosen = more, chosen + 1
        console.print(
            f"after {before} pairs {len(open_claims)} claims are not decided; {chosen} of them, the widest intervals "
            f"first, get {n} pairs within the budget's time",
            markup=False,
        )
        wanted = [figure.upto(pairs, looks[0]) for figure in figures]
        failed |= train(wanted, runs, parallel=parallel, console=console)
    return failed


def first_look(figures: Sequence[Figure], budget: Budget) -> list[Figure]:
    """The figures with the pairs that are trained in any case."""
    return [figure.upto({}, min([*budget.looks, budget.seeds])) for figure in figures]


def _minutes(figures: Sequence[Figure], pairs: Mapping[str, int], budget: Budget) -> float:
    wanted: list[Wanted] = [run for f in figures for run in f.upto(pairs, min(budget.looks)).runs()]
    return cost(by_seed(wanted), budget) / 60


def _open(figures: Sequence[Figure]) -> Iterator[tuple[float, set[str]]]:
    """Width of the interval of every claim that is not decided, and the identities of its arms' recipes."""
    for figure in figures:
        for panel in figure.panels:
            for claim in panel.spec.claims if panel.looks else ():
                found = decide(claim, panel, figure)
                sizes = panel.sizes if len(found) > 1 else ()
                for k, verdict in enumerate(found):
                    if verdict.verdict == NOT_RESOLVED and verdict.unit == UNIT and verdict.smallest is not None:
                        size = sizes[k * len(sizes) // len(found)] if sizes else None
                        yield 2 * verdict.smallest, _recipes(panel, claim, size)


def _recipes(panel: Panel, claim: ClaimSpec, size: str | None) -> set[str]:
    """Of the two arms of a claim, at one of the sizes of its panel or at all."""
    labels = {claim.a, claim.b}
    if size is not None:
        labels = {f"{label}, {size}" for label in labels}
    elif panel.series:
        labels = {arm for series in panel.series if series.label in labels for arm in series.arms}
    return {arm.recipe.identity for arm in panel.arms if arm.label in labels and arm.recipe}
