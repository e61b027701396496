"""Arms of a panel: first planned, then with their runs; and series of arms over settings, sizes or lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_sv.analysis.optimum import Optimum, fit_optimum
from lightning_sv.analysis.scaling import ScalingFit, fit_scaling
from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import Curve, Run
from lightning_sv.runs.tags import VAL_LOSS

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
