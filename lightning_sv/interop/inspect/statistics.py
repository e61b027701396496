"""Statistics of one scale vector gamma."""

from typing import NamedTuple

from torch import Tensor

from lightning_sv.errors import ConfigError

#: threshold of dead channels, relative to the median size of a vector's entries
DEAD = 0.05
#: threshold of outlier channels, relative to the same
OUTLIER = 8.0


class StoredVector(NamedTuple):
    """A scale vector as stored in a file."""

    name: str  #: name of the parameter, or of our module
    role: str  #: 'input' or 'output'
    stored: Tensor  #: gamma - origin, in the stored dtype
    origin: float  #: constant that the norm adds: 1 if it multiplies by 1 + w, usually 0
    why: str  #: reason why matrices cannot absorb it, or ''


class VectorStatistics(NamedTuple):
    """Statistics of a scale vector gamma."""

    name: str  #: name of the parameter, or of our module
    depth: int | None  #: number of its layer; None outside the layers
    role: str  #: 'input' or 'output'
    dtype: str  #: stored dtype
    size: int  #: number of entries
    mean: float  #: mean of gamma
    rms: float  #: root mean square of gamma
    smallest: float  #: minimum of gamma
    largest: float  #: maximum of gamma
    low: float  #: 5th percentile of gamma
    high: float  #: 95th percentile of gamma
    negative: float  #: fraction of entries below 0
    at_start: float  #: fraction of entries exactly 1, the initial value
    distinct: int  #: number of different values
    dead: float  #: fraction below 5% of the median size
    outliers: float  #: fraction above 8 times the median size
    folds: bool  #: True if matrices can absorb it
    why: str  #: reason why they cannot, or ''


def statistics(vector: StoredVector) -> VectorStatistics:
    """Return the statistics of a vector."""
    stored = vector.stored.double().flatten()
    gamma = stored + vector.origin
    if not gamma.isfinite().all():
        raise ConfigError(f"{vector.name} has entries that are not finite; the model has diverged.")
    size = gamma.abs()
    median = size.quantile(0.5)
    return VectorStatistics(
        name=vector.name,
        depth=_depth(vector.name),
        role=vector.role,
        dtype=str(vector.stored.dtype).removeprefix("torch."),
        size=gamma.numel(),
        mean=gamma.mean().item(),
        rms=gamma.square().mean().sqrt().item(),
        smallest=gamma.min().item(),
        largest=gamma.max().item(),
        low=gamma.quantile(0.05).item(),
        high=gamma.quantile(0.95).item(),
        negative=_share(gamma < 0),
        at_start=_share(stored == 1 - vector.origin),
        distinct=len(stored.unique()),
        dead=_share(size < DEAD * median),
        outliers=_share(size > OUTLIER * median),
        folds=not vector.why,
        why=vector.why,
    )


def _depth(name: str) -> int | None:
    """Return the first number in a name."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return None


def _share(mask: Tensor) -> float:
    return mask.double().mean().item()
