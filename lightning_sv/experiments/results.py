"""Figures, panels, arms, pairs and verdicts: first planned, then with their runs."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sv.analysis.optimum import Optimum, fit_optimum
from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, token_efficiency
from lightning_sv.analysis.scaling import ScalingFit, fit_scaling
from lightning_sv.analysis.verdicts import CONFIDENCE, VerdictWord, difference_sentence, direction, tokens_sentence
from lightning_sv.atomic import reading
from lightning_sv.errors import ConfigError, NotTestableError
from lightning_sv.experiments.claims.pooling import FINAL, TWO_SIDED, Pool
from lightning_sv.experiments.spec import FigureSpec, PanelKind, PanelSpec
from lightning_sv.runs.directory import config_value
from lightning_sv.runs.events import VAL_LOSS, Curve, Run

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.run_spec import RunSpec


#: a requested run: its specification and its seed
RunRequest = tuple["RunSpec", int]


@dataclass(frozen=True, eq=False)
class Arm:
    """One arm of a panel, or one point of a series, with its runs.

    Attributes:
        runs: complete runs, one per seed; empty before they are read
        ours: if True, the arm is not in the paper
        run_spec: configuration of the runs; None for run directories of a user
        seeds: seeds of the runs; in a planned panel the same for all arms
        series: name of its series, if the panel is a grid, of sizes or of lengths
        point: values of the axes of a grid; else activated parameters or tokens per parameter
        size: name of the point among sizes or lengths
        diverged: further runs, whose last loss is NaN
    """

    label: str
    runs: tuple[Run, ...] = ()
    ours: bool = False
    baseline: bool = False
    run_spec: "RunSpec | None" = None
    seeds: tuple[int, ...] = ()
    series: str = ""
    point: tuple[float, ...] = ()
    size: str = ""
    diverged: tuple[Run, ...] = ()

    @property
    def name(self) -> str:
        """Name in legends."""
        return f"{self.label} (ours)" if self.ours else self.label

    @property
    def requests(self) -> list[RunRequest]:
        """Requested runs, one per seed."""
        return [(self.run_spec, seed) for seed in self.seeds] if self.run_spec else []

    @property
    def losses(self) -> NDArray[np.float64]:
        """(n,) final validation losses, nats per token."""
        return np.array([run.val_loss for run in self.runs], dtype=np.float64)

    @property
    def curves(self) -> list[Curve]:
        """Validation losses against training tokens, one per seed."""
        return [run.curve(VAL_LOSS) for run in self.runs]

    @property
    def by_seed(self) -> dict[int, Run]:
        """Seed -> run; 0, 1, ... if the seeds are unknown."""
        return dict(zip(self.seeds or range(len(self.runs)), self.runs, strict=True))

    def on(self, seeds: Sequence[int]) -> "Arm":
        """Return the arm with the runs of these seeds."""
        return replace(self, runs=tuple(self.by_seed[seed] for seed in seeds), seeds=tuple(seeds))


@dataclass(frozen=True)
class Series:
    """One strategy at all points of a grid, of sizes or of lengths; `planned` includes points that diverged."""

    label: str
    arms: tuple[Arm, ...]
    planned: tuple[tuple[float, ...], ...] = ()

    @property
    def baseline(self) -> bool:
        """If True, the others are compared with it."""
        return self.arms[0].baseline

    @property
    def name(self) -> str:
        """Name in legends."""
        return f"{self.label} (ours)" if self.arms[0].ours else self.label

    @property
    def values(self) -> list[float]:
        """Activated parameters (sizes) or tokens per parameter (lengths) of the points."""
        return [arm.point[0] for arm in self.arms]

    @property
    def optimum(self) -> Optimum:
        """Optimum of a grid."""
        return fit_optimum([arm.point for arm in self.arms], [arm.losses.tolist() for arm in self.arms], self.planned)


@lru_cache(maxsize=100)
def fit_series(a: Series, b: Series) -> list[ScalingFit]:
    """Fit the scaling laws of two series at the sizes of A, although strategies differ in parameters.

    Raises:
        NotTestableError: different sizes, fewer than two, or losses that are not finite
    """
    ours, theirs = ([arm.size for arm in series.arms] for series in (a, b))
    if ours != theirs:
        raise NotTestableError(f"its sizes {theirs} are not the baseline's {ours}.")
    losses = (np.stack([arm.losses for arm in series.arms]) for series in (a, b))
    return fit_scaling([float(size) for size in a.values], *losses)


class Table(NamedTuple):
    """Content of a panel of the kind `table`, with a note on its source."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Read results of `make theory` (the claim `or` of Figure 11, with eight digits) or of `make bench`."""
        columns: tuple[str, ...]
        rows: list[tuple[str | float, ...]]
        with reading(path):
            content = path.read_bytes()
        try:
            found = json.loads(content)
            if isinstance(found, list):
                columns = ("part", "statement", "stated", "measured", "verdict")
                cells = [[row[key] for key in columns] for row in found if row["claim"] == "or"]
                rows = [tuple(x if isinstance(x, str) else f"{x:.8g}" for x in row) for row in cells]
                note = f"Checked apart from this page by make theory ({path})."
            else:
                columns = ("strategy", "ms a step", "over llama", "low", "high", "pairs")
                rows = [
                    (f"{row['name']}, {mode}", *(row[key] for key in ("milliseconds", "ratio", "low", "high", "pairs")))
                    for mode, groups in found.items()
                    if isinstance(groups, dict)
                    for row in groups.get("strategies", ())
                ]
                machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
                note = f"Measured apart from this page ({path}): {machine}."
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} has no figures ({error!r}); make theory or make bench writes it.") from error
        if not rows:
            raise ConfigError(f"{path} has neither the claim 'or' of make theory nor the strategies of make bench.")
        return cls(columns, tuple(rows), note)

    @classmethod
    def of_throughput(cls, arms: Sequence[Arm]) -> "Table":
        """Return tokens per second and peak memory, medians of the second half of each run; and micro-batches."""

        def late(arm: Arm, tag: str) -> float:
            return float(np.mean([np.median(x[len(x) // 2 :]) for x in (run.curve(tag).values for run in arm.runs)]))

        def batch(arm: Arm) -> str | float:
            return config_value(arm.runs[0].config, "data.micro_batch") or "not stated"

        speed, memory = "throughput/tokens_per_s", "memory/peak_gib"
        rows = tuple((arm.label, late(arm, speed), late(arm, memory), batch(arm), len(arm.runs)) for arm in arms)
        return cls(("strategy", "tokens per second", "peak memory, GiB", "micro-batch", "runs"), rows)


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
    table: Table | None = None
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
        """Kind of plot."""
        return self.spec.kind

    def arm(self, label: str) -> Arm:
        """Return the arm with a label, which must exist."""
        return {arm.label: arm for arm in self.arms}[label]

    def alike(self, arms: Sequence[Arm]) -> list[list[Arm]]:
        """Group arms by size; other panels have one group."""
        return [[arm for arm in arms if arm.size == size] for size in dict.fromkeys(arm.size for arm in arms)]

    def add_to(self, pool: Pool) -> Pool:
        """Add the runs to a pool, with those that share their scatter; return the pool."""
        for arms in self.alike(self.every or self.arms) if self.kind != "table" else []:
            pool.add({self._key(arm): arm.by_seed for arm in arms if arm.runs})
        return pool

    def _key(self, arm: Arm) -> Hashable:
        grid = self.title if self.kind == "grid" else ""  # a grid has its own pool
        return grid, arm.run_spec.identity if arm.run_spec else arm.label

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
        """Series -> fits of its laws and the baseline's; and why there are none. Empty unless the kind is `scaling`."""
        found, notes, base = dict[str, list[ScalingFit]](), list[str](), self.baseline
        for series in self.series if base and self.kind == "scaling" else ():
            try:
                if base and not series.baseline:
                    found[series.label] = fit_series(base, series)
            except NotTestableError as error:
                notes.append(f"{series.name} has no scaling fit: {error}")
        return found, notes


@dataclass(frozen=True, eq=False)
class Pair:
    """The baseline A and one other arm B on the seeds that they share; differences are B - A."""

    a: Arm
    b: Arm
    difference: PairedDifference

    @cached_property
    def efficiency(self) -> TokenEfficiency:
        """Tokens of both arms to the higher one of their final losses."""
        return token_efficiency(self.a.curves, self.b.curves, TWO_SIDED, to_higher=True)

    @property
    def sentences(self) -> tuple[str, str]:
        """The verdict, and the ratio of their tokens, each as a sentence."""
        a, b = self.a.label, self.b.label
        return difference_sentence(a, b, self.difference), tokens_sentence(a, b, self.efficiency, TWO_SIDED)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers of the pair as JSON types."""
        d, e, word = self.difference, self.efficiency, direction(self.difference)
        resolved = word in ("lower", "higher")
        return {
            "b": self.b.label,
            "sentence": self.sentences[0],
            "tokens_sentence": self.sentences[1],
            "difference": {
                **asdict(d),
                "verdict": f"B {word}" if resolved else word,
                "resolved": resolved,
                "smallest_resolvable": d.smallest_resolvable,
                "seeds": list(self.a.seeds),
                "per_seed": (self.b.losses - self.a.losses).tolist(),
            },
            "tokens_to_higher_final_loss": {**asdict(e), "n": e.n},
        }


def pairs_of(panel: Panel) -> tuple[list[Pair], list[str]]:
    """Pair the baseline with each other arm, per size; also return a sentence for each arm without a pair."""
    alike = [(a, b) for b in panel.arms if not b.baseline for a in panel.arms if a.baseline and a.size == b.size]
    pairs, lost = [], []
    for a, b in alike if panel.kind in ("curves", "scaling", "lengths") else []:
        try:
            pairs.append(Pair(*panel.paired(a, b), panel.difference(b, a, confidence=TWO_SIDED)))
        except NotTestableError as error:
            lost.append(f"{b.label} and {a.label} are not compared: {error}")
    return pairs, lost


@dataclass(frozen=True)
class Verdict:
    """Result of one claim, a row of verdicts.csv.

    Attributes:
        claim: statement, e.g. `unified ends below llama`
        verdict: one of five words; with one pair at most `not resolved`
        sentence: verdict with its numbers
        estimate: estimate of the quantity of the claim
        smallest: smallest effect that this scatter and n resolve, half of the interval
        unit: unit of the estimate and its interval; `times` is a ratio
        confidence: coverage of the interval
        part: quantity of the estimate, if the claim does not name it
        p: one-sided p value of the verdict, scaled so that 5% is the threshold for each coverage; if nothing is
            resolved, the smaller one of both sides
        p_corrected: p corrected for the number of primary claims, or of the others
        corrected: verdict by `p_corrected`
        paper_value: number of the paper for the estimate, if the runs have its models and tokens
        agreement: `consistent` if the interval contains that number, `not consistent` if not, else empty
        earlier: earlier recorded verdicts, with dates
        sides: 2 if p covers both sides; 1 if the opposite of the claim is also tested
        own_low: lower end of the interval by the scatter of the pairs alone, if `low` is pooled and the pairs are few
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
    agreement: str = ""
    earlier: str = ""
    sides: int = 1
    own_low: float | None = None
    own_high: float | None = None


@dataclass(frozen=True, eq=False)
class Figure:
    """One figure or table, and the verdicts on its claims.

    Attributes:
        panels: panels in the order of the paper; after the evaluation the available ones
        command: command that repeats the figure
        tokens_per_param: lowest and highest training tokens per activated parameter of its runs
        paper_scale: if True, models and tokens are those of the paper
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
        """Return each required run once, seed by seed."""
        return requests_of([self])

    def ratio(self) -> str:
        """Return training tokens per parameter as text: the lowest, and the highest if it is 10% more."""
        few, most = self.tokens_per_param
        ends = (few, most) if most > 1.1 * few else (few,)  # parameters of strategies differ by 1%
        return " to ".join(f"{ratio:.3g}" for ratio in ends if ratio > 0)

    def claim(self, verdict: Verdict) -> str:
        """Return the statement of a claim, with its panel if several panels have the same."""
        alike = len({each.panel for each in self.verdicts if each.claim == verdict.claim}) > 1
        return f"{verdict.panel}: {verdict.claim}" if alike else verdict.claim


def requests_of(figures: Sequence[Figure]) -> list[RunRequest]:
    """Return each required run of figures once, seed by seed, so that an interruption leaves complete pairs."""
    requests = [run for figure in figures for panel in figure.panels for arm in panel.arms for run in arm.requests]
    unique = {run_spec.key(seed): (run_spec, seed) for run_spec, seed in requests}
    return sorted(unique.values(), key=lambda run: run[1])
