"""Panels, planned and with their runs, and what a kind of panel decides.

    PanelSpec (YAML) -> PlannedPanel -> LoadedPanel -> Verdict, one per claim

No stage changes another. A kind of your own is a subclass of `PanelKind` with a row in `KINDS`
(docs/extend.md).
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pandas as pd

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import (
    AnyArm,
    Arm,
    PlannedArm,
    RunRequest,
    Series,
    grouped,
    on_shared_seeds,
)
from lightning_sv.experiments.claims.pooling import FINAL, TWO_SIDED, Pool
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.spec import ArmSpec, PanelSpec
from lightning_sv.runs.events import Run
from lightning_sv.statistics.line import DifferenceLine
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.verdicts import CONFIDENCE

if TYPE_CHECKING:  # they import matplotlib and torch, which some commands do not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.report.plot import Plot

#: claims about losses of two arms
LOSS_CLAIMS = ("less", "not_less", "equal", "leads", "widens", "keeps", "efficiency")


class Drawing(NamedTuple):
    """Plots of a panel, and sentences on what they lack."""

    plots: Sequence["Plot"] = ()
    notes: Sequence[str] = ()


class PanelKind:
    """A kind of panel: its arms, its table and its plots.

    The methods of this class are those of a panel with one point per arm, and without pairs.

    Attributes:
        claims: kinds of claims that its runs can decide
        fields: fields of `PanelSpec` that this kind reads and not every kind does
        scalars: logged scalars that its table and its claims read, which results.csv keeps
        arms_have_models: if True, an arm may have a model of its own; otherwise all have those of
            the panel
        has_own_pool: if True, arms do not share their scatter with other panels of the figure
        has_pairs: if True, arms are compared with the baseline in pairs, whose seeds may differ
        shows_copying: if True, the report has copying from the context if all runs measured it
        lost_runs: sentence on what is compared if runs are missing
    """

    claims: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()
    arms_have_models: ClassVar[bool] = True
    has_own_pool: ClassVar[bool] = False
    has_pairs: ClassVar[bool] = False
    shows_copying: ClassVar[bool] = False
    lost_runs: ClassVar[str] = "Arms are compared on the seeds that they share."

    def check(self, panel: PanelSpec) -> None:
        """Check a panel of this kind, under any budget.

        Raises:
            ConfigError: names the key that is wrong
        """

    def why_not(self, panel: "BudgetedPanel") -> str | None:
        """Return why a budget has no such panel; None if it has one."""
        return None

    def first_seed(self, panel: "BudgetedPanel") -> int:
        """Return the first seed of its runs."""
        return panel.budget.first_seed

    def points(self, panel: "BudgetedPanel", label: str, arm: ArmSpec) -> list[PlannedArm]:
        """Resolve an arm into its points; the planner adds their seeds."""
        run_spec = panel.resolve(arm, arm.model or panel.spec.model)
        return [PlannedArm(label, run_spec)]

    def lacking(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms without which a claim about `arms` cannot be decided."""
        return [arm for arm in arms if not arm.runs]

    def kept(self, all_arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms that can be compared, of all arms with the runs that ended."""
        return [arm for arm in all_arms if arm.runs]

    def in_complete_series(self, all_arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms of the series that lack no point."""
        incomplete = {arm.series for arm in self.lacking(all_arms)}
        return [arm for arm in all_arms if arm.series not in incomplete]

    def comparable(self, all_arms: Sequence[Arm]) -> tuple[Arm, ...]:
        """Return the arms that are compared, without pairs on the seeds that all of them have."""
        kept = self.kept(all_arms)
        if self.has_pairs:
            return tuple(kept)
        return on_shared_seeds(kept)

    def lines(self, panel: "LoadedPanel") -> list[tuple[Series, DifferenceLine]]:
        """Return each series with the line of its difference to the baseline against size."""
        return []

    def table(self, panel: "LoadedPanel") -> pd.DataFrame:
        """Return the table of a panel in the report; its cells are texts. Empty if it has none."""
        return pd.DataFrame()

    def draw(self, panel: "LoadedPanel") -> Drawing:
        """Draw the plots of a panel."""
        return Drawing()


#: `kind` of a panel in conf/paper -> its rules; the package has the rows
KINDS: dict[str, PanelKind] = {}


@dataclass(frozen=True, eq=False)
class _Panel:
    """What both stages of a panel have.

    Attributes:
        spec: the panel in conf/paper
        skipped: arm -> why the budget does not train it
        why_not: why the panel is unavailable
        warnings: sentences on its plan and on its runs
    """

    spec: PanelSpec
    _: KW_ONLY
    skipped: Mapping[str, str] = field(default_factory=dict)
    why_not: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Heading of the panel."""
        return self.spec.title

    @property
    def kind(self) -> PanelKind:
        """Rules of its kind."""
        return KINDS[self.spec.kind]


@dataclass(frozen=True, eq=False)
class PlannedPanel(_Panel):
    """One panel under a budget, with the runs that it needs.

    Attributes:
        arms: arms in order; empty if the panel is unavailable
    """

    arms: tuple[PlannedArm, ...] = ()

    @property
    def requests(self) -> list[RunRequest]:
        """Requested runs of all arms."""
        return list(chain.from_iterable(arm.requests for arm in self.arms))


@dataclass(frozen=True, eq=False)
class LoadedPanel(_Panel):
    """One panel with its runs.

    Attributes:
        arms: arms that are compared, with the runs that count; empty if the panel is unavailable
        all_arms: the same and those that cannot be compared, with all available runs
        pool: runs of this panel and of those that share their scatter with it
        notes: sentences on the runs for readers
    """

    arms: tuple[Arm, ...]
    all_arms: tuple[Arm, ...]
    pool: Pool
    _: KW_ONLY
    notes: tuple[str, ...] = ()

    @classmethod
    def of_arms(cls, spec: PanelSpec, arms: Sequence[Arm]) -> "LoadedPanel":
        """Return an available panel, whose arms share their scatter with no other panel."""
        pool = Pool()
        add_to_pool(pool, arms)
        return cls(spec, tuple(arms), tuple(arms), pool)

    def arm(self, label: str) -> Arm:
        """Return the arm with a label, which must exist."""
        return {arm.label: arm for arm in self.arms}[label]

    def only(self, names: Collection[str]) -> "LoadedPanel":
        """Return the panel of the arms with these labels or series, whatever other runs it lacks.

        Raises:
            NotTestableError: one of these arms has no runs that ended, or they share no seed
        """
        all_arms = tuple(arm for arm in self.all_arms if arm.label in names or arm.series in names)
        lacking = self.kind.lacking(all_arms)
        if lacking:
            raise NotTestableError(lacking[0].why_no_runs)
        arms = self.kind.comparable(all_arms)
        if {arm.series for arm in arms} != {arm.series for arm in all_arms}:
            found = f"{' and '.join(names)} share no seed"
            raise NotTestableError(f"{found}, or all settings of one have a diverged run")
        return LoadedPanel(self.spec, arms, all_arms, self.pool)

    def paired(self, a: Arm, b: Arm) -> tuple[Arm, Arm]:
        """Return two arms on all seeds of the pool that they share; their runs are pairs.

        Raises:
            NotTestableError: they share no seed
        """
        one = replace(a, by_seed=self.pool.runs(a.key))
        two = replace(b, by_seed=self.pool.runs(b.key))
        seeds = sorted(one.by_seed.keys() & two.by_seed.keys())
        if not seeds:
            raise NotTestableError(f"{a.label} and {b.label} share no seed.")
        return one.on(seeds), two.on(seeds)

    def difference(
        self, a: Arm, b: Arm, of: Callable[[Run], float] = FINAL, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """A - B with the scatter of all arms of their pool; see `Pool.difference`."""
        return self.pool.difference(a.key, b.key, of, confidence)

    @property
    def is_shown(self) -> bool:
        """If True, the report has the panel: it is available, or some of its runs ended."""
        return self.why_not is None or any(arm.has_ended for arm in self.all_arms)

    @property
    def series(self) -> tuple[Series, ...]:
        """Strategies of a grid, of sizes or of lengths; empty for other panels."""
        planned = grouped(self.all_arms, attrgetter("series"))
        series = []
        for name, arms in grouped(self.arms, attrgetter("series")).items():
            if name:
                points = tuple(arm.point for arm in planned[name])
                series.append(Series(name, tuple(arms), points))
        return tuple(series)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes or lengths; empty for other panels."""
        return tuple(dict.fromkeys(arm.size for arm in self.all_arms if arm.size))

    @property
    def baseline(self) -> Series | None:
        """The series of the baseline."""
        return next((series for series in self.series if series.baseline), None)

    @property
    def pairs(self) -> list[Pair]:
        """Pairs of the baseline and each other arm, per size."""
        return self._pairs_and_reasons[0]

    @property
    def unpaired(self) -> list[str]:
        """Sentences on the arms without a pair."""
        return self._pairs_and_reasons[1]

    @cached_property
    def _pairs_and_reasons(self) -> tuple[list[Pair], list[str]]:
        if not self.kind.has_pairs:
            return [], []
        pairs: list[Pair] = []
        lost: list[str] = []
        baselines = {arm.size: arm for arm in self.arms if arm.baseline}
        for b in self.arms:
            a = baselines.get(b.size, b)
            if a is b:
                continue

            try:
                difference = self.difference(b, a, confidence=TWO_SIDED)
            except NotTestableError as error:
                lost.append(f"{b.label} and {a.label} are not compared: {error}")
            else:
                pairs.append(Pair(*self.paired(a, b), difference))
        return pairs, lost


def by_size(arms: Sequence[AnyArm]) -> list[list[AnyArm]]:
    """Return the arms of each size or length; all arms of a panel without sizes are one group."""
    return list(grouped(arms, attrgetter("size")).values())


def add_to_pool(pool: Pool, arms: Sequence[Arm]) -> None:
    """Add the runs of a panel to a pool; arms of one size share their scatter."""
    for group in by_size(arms):
        runs: dict[Hashable, Mapping[int, Run]] = {}
        for arm in group:
            if arm.by_seed:
                runs[arm.key] = arm.by_seed
        pool.add(runs)
