"""Panels, and what a kind of panel decides: its arms, the runs that it compares, its table and its plots.

A kind of your own is a subclass with a row in `KINDS` (docs/extend.md).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from lightning_sv.analysis.paired import PairedDifference
from lightning_sv.analysis.scaling import ScalingFit
from lightning_sv.analysis.verdicts import CONFIDENCE
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, Series, fit_series
from lightning_sv.experiments.claims.pooling import FINAL, Pool
from lightning_sv.experiments.spec import ArmSpec, PanelSpec
from lightning_sv.runs.events import Run

if TYPE_CHECKING:  # they import matplotlib and torch, which some commands do not need
    from lightning_sv.experiments.report.plot import Plot
    from lightning_sv.experiments.run_spec import RunResolver

#: claims about losses of two arms
LOSS_CLAIMS = ("less", "not_less", "equal", "leads", "widens", "keeps", "efficiency")


class TextTable(NamedTuple):
    """Headings and cells of a table of the report; no headings if there is none."""

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


class Drawing(NamedTuple):
    """Plots of a panel, and sentences on what they lack."""

    plots: Sequence["Plot"] = ()
    notes: Sequence[str] = ()


class MeasuredTable(NamedTuple):
    """Measured content that is not a loss, with a note on its source."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Choices:
    """Choices of a budget for a panel.

    Attributes:
        budget: name of the budget
        roles: roles of the models of the panel that the budget has
        axes: key of a grid -> values
        first_seed: first seed of comparisons
    """

    budget: str
    roles: Sequence[str]
    axes: Mapping[str, Sequence[int | float]]
    first_seed: int


class PanelKind:
    """A kind of panel; the methods of this class are those of a panel with one point per arm, and without pairs.

    Attributes:
        claims: kinds of claims that its runs can decide
        fields: fields of `PanelSpec` that this kind reads and not every kind does
        arms_have_models: if True, an arm may have a model of its own; otherwise all have those of the panel
        is_pooled: if True, arms share their scatter
        has_own_pool: if True, they do not share it with other panels of the figure
        has_pairs: if True, arms are compared with the baseline in pairs
        has_laws: if True, scaling laws are fitted to its series
        has_optima: if True, its optima are written to out/tuned
        shows_training: if True, the report has copying, sizes of steps and gammas if the runs measured them
        uses_every_seed: if True, each arm has all of its runs, otherwise those of the seeds that all arms have
        lost_runs: sentence on what is compared if runs are missing
    """

    claims: ClassVar[tuple[str, ...]] = ()
    fields: ClassVar[tuple[str, ...]] = ()
    arms_have_models: ClassVar[bool] = True
    is_pooled: ClassVar[bool] = True
    has_own_pool: ClassVar[bool] = False
    has_pairs: ClassVar[bool] = False
    has_laws: ClassVar[bool] = False
    has_optima: ClassVar[bool] = False
    shows_training: ClassVar[bool] = False
    uses_every_seed: ClassVar[bool] = False
    lost_runs: ClassVar[str] = "Arms are compared on the seeds that they share."

    def problems(self, panel: PanelSpec) -> Iterator[str]:
        """Yield errors in a panel that do not depend on the budget."""
        yield from ()

    def why_not(self, choices: Choices) -> str | None:
        """Return why a budget has no such panel; None if it has one."""
        return None

    def warnings(self, panel: PanelSpec, choices: Choices) -> list[str]:
        """Return warnings about the plan of a panel."""
        return []

    def first_seed(self, choices: Choices) -> int:
        """Return the first seed of its runs."""
        return choices.first_seed

    def points(
        self, panel: PanelSpec, label: str, arm: ArmSpec, resolver: "RunResolver", choices: Choices
    ) -> list[Arm]:
        """Resolve an arm into its points."""
        return [Arm(label, run_spec=resolver.resolve(panel, arm, arm.model or panel.model))]

    def comparable(self, every: Sequence[Arm]) -> list[Arm]:
        """Return the arms that can be compared, of all arms with the runs that ended.

        Raises:
            NotTestableError: no arm of a series can be compared
        """
        kept = [arm for arm in every if arm.runs or not arm.diverged]
        had_baseline = any(arm.baseline for arm in every)
        if had_baseline and not any(arm.baseline for arm in kept):
            return list(every)  # a difference needs the baseline
        return kept

    def measure(self, panel: PanelSpec, arms: Sequence[Arm]) -> MeasuredTable | None:
        """Return measured content that is not a loss; None if the kind has none."""
        return None

    def table(self, panel: "Panel") -> TextTable:
        """Return the table of a panel in the report."""
        return TextTable()

    def draw(self, panel: "Panel") -> Drawing:
        """Draw the plots of a panel."""
        return Drawing()


#: `kind` of a panel in conf/paper -> its rules; the package has the rows
KINDS: dict[str, PanelKind] = {}


@dataclass(frozen=True, eq=False)
class Panel:
    """One panel of a figure.

    Attributes:
        arms: arms in order; empty if the panel is unavailable
        why_not: why the panel is unavailable
        notes: sentences on the runs for readers
        every: arms with all available runs, also those without a pair
        pool: runs of all panels of the figure
    """

    spec: PanelSpec
    arms: tuple[Arm, ...] = ()
    table: MeasuredTable | None = None
    why_not: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    every: tuple[Arm, ...] = ()
    pool: Pool | None = None

    @property
    def title(self) -> str:
        """Heading of the panel."""
        return self.spec.title

    @property
    def kind(self) -> PanelKind:
        """Rules of its kind."""
        return KINDS[self.spec.kind]

    def arm(self, label: str) -> Arm:
        """Return the arm with a label, which must exist."""
        return {arm.label: arm for arm in self.arms}[label]

    def alike(self, arms: Sequence[Arm]) -> list[list[Arm]]:
        """Group arms by size; other panels have one group."""
        return [[arm for arm in arms if arm.size == size] for size in dict.fromkeys(arm.size for arm in arms)]

    def add_to(self, pool: Pool) -> Pool:
        """Add the runs to a pool, with those that share their scatter; return the pool."""
        if not self.kind.is_pooled:
            return pool
        for arms in self.alike(self.every or self.arms):
            pool.add({self._key(arm): arm.by_seed for arm in arms if arm.runs})
        return pool

    def _key(self, arm: Arm) -> Hashable:
        own_pool = self.title if self.kind.has_own_pool else ""
        return own_pool, arm.run_spec.identity if arm.run_spec else arm.label

    def paired(self, a: Arm, b: Arm) -> tuple[Arm, Arm]:
        """Return two arms on all seeds of the pool that they share, so that their runs are pairs."""
        pool = self.pool or self.add_to(Pool())

        def complete(arm: Arm) -> Arm:
            found = pool.runs(self._key(arm)) or arm.by_seed  # a table has no pool
            return replace(arm, runs=tuple(found.values()), seeds=tuple(found))

        one, two = complete(a), complete(b)
        seeds = sorted({*one.seeds} & {*two.seeds})
        return one.on(seeds), two.on(seeds)

    def difference(
        self, a: Arm, b: Arm, of: Callable[[Run], float] = FINAL, confidence: float = CONFIDENCE
    ) -> PairedDifference:
        """A - B with the scatter of all arms of their pool; raise NotTestableError if a run lacks the value."""
        pool = self.pool or self.add_to(Pool())
        return pool.difference(self._key(a), self._key(b), of, confidence)

    @property
    def series(self) -> tuple[Series, ...]:
        """Strategies of a grid, of sizes or of lengths; empty for other panels."""
        names = dict.fromkeys(arm.series for arm in self.arms if arm.series)
        planned = {name: tuple(arm.point for arm in self.every if arm.series == name) for name in names}
        return tuple(Series(n, tuple(arm for arm in self.arms if arm.series == n), planned[n]) for n in names)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes or lengths; empty for other panels."""
        return tuple(dict.fromkeys(arm.size for arm in self.arms if arm.size))

    @property
    def baseline(self) -> Series | None:
        """The series of the baseline."""
        return next((series for series in self.series if series.baseline), None)

    @property
    def fits(self) -> tuple[dict[str, list[ScalingFit]], list[str]]:
        """Series -> fits of its laws and the baseline's; and why there are none. Empty unless the kind has laws."""
        fits: dict[str, list[ScalingFit]] = {}
        notes: list[str] = []
        baseline = self.baseline
        if baseline is None or not self.kind.has_laws:
            return fits, notes
        for series in self.series:
            if series.baseline:
                continue
            try:
                fits[series.label] = fit_series(baseline, series)
            except NotTestableError as error:
                notes.append(f"{series.name} has no scaling fit: {error}")
        return fits, notes


def baseline_first(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms in their order, the baseline first."""
    return sorted(arms, key=lambda arm: not arm.baseline)
