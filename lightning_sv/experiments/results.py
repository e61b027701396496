"""A figure: arms, panels and verdicts, first planned, then with its runs. Plain data throughout."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_sv.analysis.optimum import Optimum, fit_optimum
from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.scaling import Scaling, fit_scaling
from lightning_sv.analysis.verdicts import CONFIDENCE, VerdictWord
from lightning_sv.errors import ConfigError, NotTestableError, unknown
from lightning_sv.experiments.claims.pooling import FINAL, Pool
from lightning_sv.experiments.spec import FigureSpec, PanelKind, PanelSpec
from lightning_sv.runs.events import VAL_LOSS, Curve, Run

if TYPE_CHECKING:  # torch with it, and a report needs none
    from lightning_sv.experiments.run_spec import RunSpec


#: a requested run: its specification and its seed
RunRequest = tuple["RunSpec", int]


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a panel, or one point of a grid or of a scaling panel, and its runs.

    Attributes:
        runs: completed, one per seed, in their order; none before they are read
        ours: whether the arm is not the paper's
        run_spec: what was trained; None where the runs are somebody's own directories
        seeds: of the runs; all arms of a panel that is not of somebody's own runs have the same
    """

    label: str
    runs: tuple[Run, ...] = ()
    ours: bool = False
    baseline: bool = False
    run_spec: "RunSpec | None" = None
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What a legend calls it."""
        return f"{self.label} (ours)" if self.ours else self.label

    @property
    def requests(self) -> list[RunRequest]:
        """One run per seed."""
        return [(self.run_spec, seed) for seed in self.seeds] if self.run_spec else []

    @property
    def losses(self) -> NDArray[np.float64]:
        """(n,) final validation losses, nats per token; NaN where a run diverged."""
        return np.array([run.val_loss for run in self.runs], dtype=np.float64)

    @property
    def curves(self) -> list[Curve]:
        """Validation losses against training tokens, one per seed."""
        return [run.curve(VAL_LOSS) for run in self.runs]

    @property
    def by_seed(self) -> dict[int, Run]:
        """Seed -> its run; 0, 1, ... for runs that do not say theirs."""
        return dict(zip(self.seeds or range(len(self.runs)), self.runs, strict=True))

    def paired(self, other: "Arm") -> tuple["Arm", "Arm"]:
        """Both arms on the seeds that they share, so that their runs are pairs."""
        if self.seeds == other.seeds:
            return self, other
        seeds = tuple(seed for seed in self.seeds if seed in other.seeds)
        return self.on(seeds), other.on(seeds)

    def on(self, seeds: Sequence[int]) -> "Arm":
        """The arm on some of its seeds, their runs with them."""
        return replace(self, runs=tuple(self.by_seed[seed] for seed in seeds), seeds=tuple(seeds))


@dataclass(frozen=True)
class Series:
    """The points of one arm of a grid or a scaling panel; all but the label and its two marks in one order.

    Attributes:
        arms: labels of the arms at its points
        values: of a scaling panel: activated parameters of the sizes; of a panel of lengths: tokens per parameter
        sizes: what they are called
        points: of a grid: the values of its axes
    """

    label: str
    ours: bool
    baseline: bool
    arms: tuple[str, ...]
    values: tuple[float, ...] = ()
    sizes: tuple[str, ...] = ()
    points: tuple[tuple[float, ...], ...] = ()

    @property
    def name(self) -> str:
        """What a legend calls it."""
        return f"{self.label} (ours)" if self.ours else self.label


@dataclass(frozen=True)
class Table:
    """A panel that is a table.

    Attributes:
        note: where the numbers are from
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""


@dataclass(frozen=True, eq=False)
class Panel:
    """One panel of a figure.

    Attributes:
        arms: in its order; none where the panel cannot be had
        series: of a grid or a scaling panel
        table: of a panel that is a table
        left_out: which of its runs are missing, where it rests on the others
        notes: sentences for the reader: what was trained, and how far it can be trusted
        every: its arms with all runs that are there, also those whose pair is missing; none where no pair is
        pool: the runs of all figures that are evaluated together
    """

    spec: PanelSpec
    arms: tuple[Arm, ...] = ()
    series: tuple[Series, ...] = ()
    table: Table | None = None
    why_not: str | None = None
    left_out: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    every: tuple[Arm, ...] = ()
    pool: Pool | None = None
    _fits: dict[tuple[str, str], Scaling] = field(default_factory=dict, init=False, repr=False)

    @property
    def title(self) -> str:
        """Its heading."""
        return self.spec.title

    @property
    def kind(self) -> PanelKind:
        """How it is drawn."""
        return self.spec.kind

    def arm(self, label: str) -> Arm:
        """The arm of a label.

        Raises:
            ConfigError: there is none
        """
        for arm in self.arms:
            if arm.label == label:
                return arm
        raise ConfigError(unknown(f"panel {self.title!r}: arm", label, [arm.label for arm in self.arms]))

    def alike(self, arms: Sequence[Arm]) -> list[list[Arm]]:
        """Some of its arms, those that are compared with one another together: of one size, or all of them."""
        of = {arm.label: arm for arm in arms}
        columns = zip(*(series.arms for series in self.series), strict=True) if self.sizes else [of]
        return [[of[label] for label in labels] for labels in columns]

    def add_to(self, pool: Pool) -> Pool:
        """Add its runs to those whose scatter they share; return the pool."""
        for arms in self.alike(self.every or self.arms) if self.kind != "table" else []:
            pool.add({self._key(arm): arm.by_seed for arm in arms if arm.runs})
        return pool

    def _key(self, arm: Arm) -> Hashable:
        of_its_own = self.title if self.kind == "grid" else ""
        return of_its_own, arm.run_spec.identity if arm.run_spec else arm.label

    def difference(
        self, a: Arm, b: Arm, of: Callable[[Run], float] = FINAL, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """A - B, with the scatter of all arms like them.

        Raises:
            NotTestableError: a run does not have it, or the arms share no seed
        """
        pool = self.pool or self.add_to(Pool())
        return pool.difference(self._key(a), self._key(b), of, confidence)

    def losses(self, series: Series) -> list[NDArray[np.float64]]:
        """(n,) final losses at every point of a series, nats per token; NaN where a run diverged."""
        return [self.arm(label).losses for label in series.arms]

    @property
    def sizes(self) -> tuple[str, ...]:
        """Of a scaling panel or one of lengths what its points are called; of others nothing."""
        return self.series[0].sizes if self.series else ()

    def optimum(self, series: Series) -> Optimum:
        """Where an arm's loss is lowest on its grid."""
        return fit_optimum(series.points, [losses.tolist() for losses in self.losses(series)])

    def fit(self, a: Series, b: Series) -> Scaling:
        """The scaling laws of two series, both at A's sizes: what a strategy adds in scale vectors is part of it.

        The report and the claims ask for the same; it is computed once.

        Raises:
            NotTestableError: other sizes, fewer than two, or losses that are not finite
        """
        if (a.label, b.label) not in self._fits:
            if b.sizes != a.sizes:
                raise NotTestableError(f"its sizes {list(b.sizes)} are not the baseline's {list(a.sizes)}.")
            losses = (np.stack(self.losses(series)) for series in (a, b))
            self._fits[a.label, b.label] = fit_scaling([float(size) for size in a.values], *losses)
        return self._fits[a.label, b.label]

    @property
    def baseline(self) -> Series | None:
        """The series that the others are compared with."""
        return next((series for series in self.series if series.baseline), None)

    @property
    def fits(self) -> list[tuple[Series, Scaling | str]]:
        """Every other series of a scaling panel with its laws and the baseline's, or why there are none."""
        base, found = self.baseline, list[tuple[Series, Scaling | str]]()
        for series in self.series if base else ():
            try:
                found += [(series, self.fit(base, series))] if base and series is not base else []
            except NotTestableError as error:
                found.append((series, str(error)))
        return found


@dataclass(frozen=True)
class Verdict:
    """What the runs say about one claim.

    Attributes:
        claim: the statement in words, e.g. `unified ends below llama`
        verdict: one of five words; a claim of one pair is never more than `not resolved`
        sentence: the verdict with its numbers, as one plain sentence
        estimate: of what the claim is about; over pairs alone the mean of theirs
        smallest: the smallest effect that this scatter and n resolve, half the interval; None without one
        unit: of the estimate and its interval; `times` is a ratio
        confidence: coverage of the interval; its ends are the bounds of one-sided tests at half the rest
        part: what the estimate is of, where it is not what the claim names
        p: one-sided p value of the word, times 5% over the error that its interval may make on that side, so that all
            compare with 5%; where nothing is resolved that of the nearest. None where nothing is tested
        primary: whether it is the first question of its figure
        p_corrected: p for all claims that were judged together: the primary ones among themselves, and the others
        corrected: the word that is left then
        paper_value: the paper's number for the estimate, where the runs are of its models and tokens
        agreement: whether the interval holds that number
        earlier: the words of earlier records, with their dates
        sides: 2 where p is of both sides together; 1 where the opposite of the claim is tested as well
    """

    claim: str
    verdict: VerdictWord
    sentence: str
    estimate: float | None
    low: float | None
    high: float | None
    n: int
    smallest: float | None
    paper: str
    panel: str = ""
    unit: str = "nats per token"
    confidence: float = 0.9
    part: str = ""
    p: float | None = None
    df: int | None = None
    primary: bool = False
    p_corrected: float | None = None
    corrected: VerdictWord | None = None
    paper_value: float | None = None
    agreement: Literal["", "consistent", "not consistent"] = ""
    earlier: str = ""
    sides: int = 1


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure or table, and the verdicts on its claims.

    Attributes:
        panels: in the paper's order; of a judged figure those that can be had
        command: what makes this figure again
        tokens_per_param: training tokens per (activated) parameter of its runs, the fewest and the most
        paper_scale: whether its models and tokens are the paper's
    """

    spec: FigureSpec
    panels: tuple[Panel, ...]
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str = ""
    tokens_per_param: tuple[float, float] = (0.0, 0.0)
    budget: str = ""
    paper_scale: bool = False

    def requests(self) -> list[RunRequest]:
        """Every run that it needs once, seed by seed."""
        return requests_of([self])

    def ratio(self) -> str:
        """Training tokens per parameter in words: the fewest, "to" the most where these are a tenth more."""
        few, most = self.tokens_per_param
        ends = (few, most) if most > 1.1 * few else (few,)  # strategies differ by a hundredth in their parameters
        return " to ".join(f"{ratio:.3g}" for ratio in ends if ratio > 0)

    def claim(self, verdict: Verdict) -> str:
        """A claim in words, with its panel where claims of several panels are alike."""
        alike = len({each.panel for each in self.verdicts if each.claim == verdict.claim}) > 1
        return f"{verdict.panel}: {verdict.claim}" if alike else verdict.claim


def requests_of(figures: Sequence[Figure]) -> list[RunRequest]:
    """Every run that figures need once, in order of the seeds, so that a stop leaves whole pairs."""
    wanted = [run for figure in figures for panel in figure.panels for arm in panel.arms for run in arm.requests]
    unique = {run_spec.key(seed): (run_spec, seed) for run_spec, seed in wanted}
    return sorted(unique.values(), key=lambda run: run[1])
