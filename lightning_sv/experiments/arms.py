"""Arms of a panel, planned and with their runs; series over settings, sizes or lengths."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import Curve, Run
from lightning_sv.runs.tags import VAL_LOSS
from lightning_sv.statistics.optimum import Optimum, fit_optimum

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.run_spec import RunSpec

ArmOrSeries = TypeVar("ArmOrSeries", "Arm", "Series")
#: an arm with or without its runs
AnyArm = TypeVar("AnyArm", "PlannedArm", "Arm")


class RunRequest(NamedTuple):
    """A run that an arm needs: its configuration and its seed."""

    run_spec: "RunSpec"
    seed: int

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.run_spec.run_name(self.seed)


@dataclass(frozen=True, eq=False)
class _ArmPlace:
    """Name and place of an arm, or of one point of a series, in its panel.

    Attributes:
        label: name in tables and claims
        ours: if True, the arm is not in the paper
        series: name of its series, if the panel is a grid, of sizes or of lengths
        point: values of the axes of a grid; else activated parameters or tokens per parameter
        size: name of the point among sizes or lengths
    """

    label: str
    _: KW_ONLY
    ours: bool = False
    baseline: bool = False
    series: str = ""
    point: tuple[float, ...] = ()
    size: str = ""

    @property
    def name(self) -> str:
        """Name in legends."""
        return _legend_name(self.label, ours=self.ours)


@dataclass(frozen=True, eq=False)
class PlannedArm(_ArmPlace):
    """An arm with the runs that it needs.

    Attributes:
        run_spec: configuration of the runs
        seeds: one run per seed
    """

    run_spec: "RunSpec"
    seeds: tuple[int, ...] = ()

    @property
    def requests(self) -> list[RunRequest]:
        """Requested runs, one per seed."""
        return [RunRequest(self.run_spec, seed) for seed in self.seeds]

    def with_runs(self, ended: Mapping[int, Run], diverged: Sequence[Run]) -> "Arm":
        """Return the arm with its runs: seed -> run that ended, and those that diverged."""
        place = {each.name: getattr(self, each.name) for each in fields(_ArmPlace)}
        return Arm(**place, by_seed=ended, run_spec=self.run_spec, diverged=tuple(diverged))


@dataclass(frozen=True, eq=False)
class Arm(_ArmPlace):
    """An arm with its runs.

    Attributes:
        by_seed: seed -> complete run
        run_spec: configuration of the runs; None for run directories of a user
        diverged: further runs, whose last loss is NaN
    """

    by_seed: Mapping[int, Run] = field(default_factory=dict)
    _: KW_ONLY
    run_spec: "RunSpec | None" = None
    diverged: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Complete runs, one per seed."""
        return tuple(self.by_seed.values())

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the complete runs."""
        return tuple(self.by_seed)

    @property
    def key(self) -> str:
        """Key in a pool; arms of one configuration are one arm."""
        if self.run_spec is None:
            return self.label
        return self.run_spec.identity

    @property
    def has_ended(self) -> bool:
        """If True, one of its runs is complete or diverged."""
        return bool(self.runs or self.diverged)

    @property
    def why_no_runs(self) -> str:
        """Sentence on an arm without a complete run."""
        if self.diverged:
            return f"all runs of {self.label} diverged"
        return f"all runs of {self.label} are missing"

    @property
    def losses(self) -> NDArray[np.float64]:
        """(n,) final validation losses, nats per token."""
        return np.array([run.val_loss for run in self.runs], dtype=np.float64)

    @property
    def curves(self) -> list[Curve]:
        """Validation losses against training tokens, one per seed."""
        return [run.curve(VAL_LOSS) for run in self.runs]

    @property
    def curves_on_same_sequences(self) -> list[Curve]:
        """The same without last validations of more sequences, one per seed."""
        return [run.losses_on_same_sequences for run in self.runs]

    def on(self, seeds: Iterable[int]) -> "Arm":
        """Return the arm with the runs of these seeds."""
        return replace(self, by_seed={seed: self.by_seed[seed] for seed in seeds})


def _legend_name(label: str, *, ours: bool) -> str:
    return f"{label} (ours)" if ours else label


def point_label(series: str, size: str) -> str:
    """Return the label of the arm of a series at one size or length."""
    return f"{series}, {size}"


def runs_of(arms: Iterable[Arm]) -> list[Run]:
    """Return the runs of arms."""
    return list(chain.from_iterable(arm.runs for arm in arms))


def grouped(arms: Iterable[AnyArm], key: Callable[[AnyArm], str]) -> dict[str, list[AnyArm]]:
    """Return key -> its arms, in their order."""
    groups: dict[str, list[AnyArm]] = {}
    for arm in arms:
        groups.setdefault(key(arm), []).append(arm)
    return groups


def baseline_first(arms: Iterable[ArmOrSeries]) -> list[ArmOrSeries]:
    """Return arms or series in their order, the baseline first."""
    return sorted(arms, key=lambda arm: not arm.baseline)


def on_shared_seeds(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Return the arms with the runs of the seeds that all of them have.

    Empty if they share none.
    """
    if not arms:
        return ()
    shared = set(arms[0].seeds).intersection(*(arm.seeds for arm in arms))
    if not shared:
        return ()
    return tuple(arm.on(sorted(shared)) for arm in arms)


@dataclass(frozen=True)
class Series:
    """One strategy at all points of a grid, of sizes or of lengths.

    `planned` includes points that diverged.
    """

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
        return _legend_name(self.label, ours=self.arms[0].ours)

    @property
    def points(self) -> list[tuple[float, ...]]:
        """Values of the axes of a grid, parameters (sizes) or tokens per parameter (lengths)."""
        return [arm.point for arm in self.arms]

    @property
    def values(self) -> list[float]:
        """First values of the points."""
        return [point[0] for point in self.points]

    @property
    def losses(self) -> NDArray[np.float64]:
        """(points, seeds) final validation losses, nats per token."""
        return np.stack([arm.losses for arm in self.arms])

    @property
    def optimum(self) -> Optimum:
        """Optimum of a grid."""
        return fit_optimum(self.points, self.losses.tolist(), self.planned)


def paired_losses(a: Series, b: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the losses of two series, (points, seeds), on the seeds that all of their arms have.

    Raises:
        NotTestableError: there is no such seed
    """
    arms = on_shared_seeds([*a.arms, *b.arms])
    if not arms:
        raise NotTestableError(f"no seed has runs of {a.label} and {b.label} at all points")
    losses = np.stack([arm.losses for arm in arms])
    n_points = len(a.arms)
    return losses[:n_points], losses[n_points:]
