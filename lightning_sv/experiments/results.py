"""Figures, as planned and with their runs, and verdicts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from lightning_sv.experiments.arms import RunRequest, runs_of
from lightning_sv.experiments.kinds.base import LoadedPanel, PlannedPanel
from lightning_sv.experiments.spec import FigureSpec
from lightning_sv.runs.events import Run
from lightning_sv.statistics.verdicts import VerdictWord


@dataclass(frozen=True)
class Verdict:
    """Result of one claim, a row of verdicts.csv; unknown numbers are NaN.

    Attributes:
        claim: statement, e.g. `unified ends below llama`
        verdict: one of five words; with one pair at most `not resolved`
        sentence: verdict with its numbers
        estimate: estimate of the quantity of the claim
        smallest: smallest effect that this scatter and n resolve, half of the interval
        unit: unit of the estimate and its interval; `times` is a ratio
        confidence: coverage of the interval
        p: one-sided p value of the verdict, scaled so that 5% is the threshold for each coverage;
            if nothing is resolved, the smaller one of both sides
        p_corrected: p corrected for the number of primary claims, or of the others
        corrected: verdict by `p_corrected`
        paper_value: number of the paper for the estimate, if the runs have its models and tokens
        agreement: `consistent` if the interval contains that number, `not consistent` if not, else
            empty
        own_low: lower end of the interval by the scatter of the pairs alone, if `low` is pooled and
            the pairs are few
    """

    claim: str
    verdict: VerdictWord
    sentence: str
    estimate: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    smallest: float = math.nan
    paper: str = ""
    panel: str = ""
    unit: str = "nats per token"
    confidence: float = 0.9
    p: float = math.nan
    df: int | None = None
    primary: bool = False
    p_corrected: float = math.nan
    corrected: VerdictWord | None = None
    paper_value: float | None = None
    agreement: str = ""
    own_low: float = math.nan
    own_high: float = math.nan


@dataclass(frozen=True, eq=False)
class PlannedFigure:
    """One figure or table under a budget, with the runs that it needs.

    Attributes:
        panels: panels in the order of the paper
        paper_scale: if True, models and tokens are those of the paper
    """

    spec: FigureSpec
    panels: tuple[PlannedPanel, ...]
    budget: str = ""
    paper_scale: bool = False

    def requests(self) -> list[RunRequest]:
        """Return each required run once, seed by seed."""
        return requests_of([self])


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure or table with its runs, and the verdicts on its claims.

    Attributes:
        panels: panels in the order of the paper; after the evaluation the available ones
        command: command that repeats the figure
        paper_scale: if True, models and tokens are those of the paper
    """

    spec: FigureSpec
    panels: tuple[LoadedPanel, ...]
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str = ""
    budget: str = ""
    paper_scale: bool = False

    def statement(self, verdict: Verdict) -> str:
        """Return the statement of a claim, with its panel if several panels have the same."""
        panels = {other.panel for other in self.verdicts if other.claim == verdict.claim}
        if len(panels) > 1:
            return f"{verdict.panel}: {verdict.claim}"
        return verdict.claim


def tokens_per_param(run: Run) -> float | None:
    """Return training tokens per activated parameter; None if the summary has no parameters."""
    parameters = run.summary.get("activated_parameters") or run.summary.get("parameters")
    if not parameters:
        return None
    return run.tokens / parameters


def panels_of(figures: Sequence[Figure]) -> Iterator[tuple[Figure, LoadedPanel]]:
    """Yield each panel of figures, with its figure."""
    for figure in figures:
        for panel in figure.panels:
            yield figure, panel


def runs_of_figures(figures: Sequence[Figure]) -> list[Run]:
    """Return the runs of all panels; a run of two panels is there twice."""
    return list(chain.from_iterable(runs_of(panel.arms) for _, panel in panels_of(figures)))


def tokens_per_param_text(runs: Iterable[Run]) -> str:
    """Return the training tokens per parameter of runs as text; empty if they are unknown.

    The highest number follows the lowest if it is 10% more.
    """
    ratios = list(filter(None, map(tokens_per_param, runs)))
    if not ratios:
        return ""
    lowest = min(ratios)
    highest = max(ratios)
    if highest > 1.1 * lowest:  # parameters of strategies differ by 1%
        return f"{lowest:.3g} to {highest:.3g}"
    return f"{lowest:.3g}"


def requests_of(figures: Sequence[PlannedFigure]) -> list[RunRequest]:
    """Return each required run of figures once.

    They are in the order of the seeds, so that an interruption leaves complete pairs.
    """
    unique: dict[str, RunRequest] = {}
    for figure in figures:
        for panel in figure.panels:
            for request in panel.requests:
                unique[request.name] = request
    return sorted(unique.values(), key=attrgetter("seed"))


def count_seeds(count: int) -> str:
    """Return `one seed` or `3 seeds`."""
    return "one seed" if count == 1 else f"{count} seeds"
