"""A figure and what came of it: its spec, the arms trained for it, what their runs say. Plain data throughout."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_sv.analysis.grids import Optimum, fit_optimum
from lightning_sv.analysis.pooled import Families
from lightning_sv.analysis.scaling import Scaling, fit_scaling
from lightning_sv.errors import ConfigError, NotTestableError, unknown
from lightning_sv.experiments.claims.outcome import Verdict
from lightning_sv.experiments.spec import FigureSpec, PanelKind, PanelSpec, Recipe, Wanted, by_seed
from lightning_sv.runs.events import VAL_LOSS, Curve, Run


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a panel: what is trained, on which seeds, and its runs once they are read.

    Args:
        label: what table and chart call it
        runs: completed, one per seed, in their order
        ours: whether the arm is not the paper's
        baseline: whether the others are compared with it; one arm of a panel at most
        recipe: what is trained; None where the runs are somebody's own directories
        seeds: that it is trained on; all arms of a panel that is not of somebody's own runs have the same
    """

    label: str
    runs: tuple[Run, ...] = ()
    ours: bool = False
    baseline: bool = False
    recipe: Recipe | None = None
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What a legend calls it."""
        return f"{self.label} (ours)" if self.ours else self.label

    @property
    def losses(self) -> NDArray[np.float64]:
        """(n,) final validation losses, nats per token; NaN where a run diverged."""
        return np.array([run.val_loss for run in self.runs], dtype=np.float64)

    @property
    def curves(self) -> list[Curve]:
        """Validation losses against training tokens, one per seed."""
        return [run.curve(VAL_LOSS) for run in self.runs]

    @property
    def wanted(self) -> list[Wanted]:
        """Its runs, whether they are there or not."""
        return [(self.recipe, seed) for seed in self.seeds] if self.recipe else []

    def paired(self, other: "Arm") -> tuple["Arm", "Arm"]:
        """Both arms on the seeds that they share, so that their runs are pairs."""
        if self.seeds == other.seeds:
            return self, other
        seeds = tuple(seed for seed in self.seeds if seed in other.seeds)
        return self.on(seeds), other.on(seeds)

    def on(self, seeds: Sequence[int]) -> "Arm":
        """The arm on some of its seeds, their runs with them."""
        runs = dict(zip(self.seeds, self.runs, strict=True))
        return replace(self, runs=tuple(runs[seed] for seed in seeds), seeds=tuple(seeds))


@dataclass(frozen=True)
class Series:
    """The points of one arm of a grid or a scaling panel; all but the label and its two marks in one order.

    Args:
        label: of the arm
        ours: whether it is not the paper's
        baseline: whether the others are compared with it
        arms: labels of the arms at its points
        values: of a scaling panel: activated parameters of the sizes; of one of lengths: tokens a parameter
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

    Args:
        columns: headings
        rows: text and numbers, one a column
        note: where the numbers are from
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""


@dataclass(frozen=True, eq=False)
class Panel:
    """One panel of a figure: settled under a budget, and with its runs once they are read.

    Args:
        spec: as in the YAML
        arms: in its order; none where the panel cannot be had
        series: of a grid or a scaling panel
        table: of a panel that is a table, once it is read
        why_not: why it cannot be had
        left_out: which of its runs are missing, where it rests on the others
        warnings: what weakens it
        notes: sentences for the reader: what was trained, and how far it can be trusted
        every: its arms with all runs that are there, also those whose pair is missing; none where no pair is
        families: which arms scatter alike, over all figures that are judged together
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
    families: Families | None = None
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


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure or table: settled under a budget, and judged once its runs are read.

    Args:
        spec: as in the YAML
        panels: in the paper's order; of a judged figure those that can be had
        verdicts: one per claim
        warnings: what weakens the comparison, one sentence each
        command: what makes this figure again
        tokens_per_param: training tokens per (activated) parameter of its runs, the fewest and the most
        budget: name of the budget
        papers_own: whether its models and tokens are the paper's
    """

    spec: FigureSpec
    panels: tuple[Panel, ...]
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str = ""
    tokens_per_param: tuple[float, float] = (0.0, 0.0)
    budget: str = ""
    papers_own: bool = False

    def runs(self) -> list[Wanted]:
        """Every run that is known beforehand, seed by seed."""
        return by_seed(run for panel in self.panels for arm in panel.arms for run in arm.wanted)

    def ratio(self) -> str:
        """Training tokens per parameter in words: the fewest, "to" the most where these are a tenth more."""
        few, most = self.tokens_per_param
        ends = (few, most) if most > 1.1 * few else (few,)  # strategies differ by a hundredth in their parameters
        return " to ".join(f"{ratio:.3g}" for ratio in ends if ratio > 0)

    def claim(self, verdict: Verdict) -> str:
        """A claim in words, with its panel where claims of several panels are alike."""
        alike = len({each.panel for each in self.verdicts if each.claim == verdict.claim}) > 1
        return f"{verdict.panel}: {verdict.claim}" if alike else verdict.claim
