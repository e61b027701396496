"""Statistics of one scale vector gamma and of the matrices W next to it.

The size of a channel j of a matrix is |w_j|^2 = sum_i W_ij^2, over the axis that gamma does not
scale. Two numbers compare gamma with it:

    balance     median_j ln(gamma_j^2 / sum over matrices of |w_j|^2)
    agreement   mean correlation over j of ln |w_j|, between matrices that share gamma

If the agreement is low, one gamma per branch (hg) may help.
"""

from functools import reduce
from itertools import combinations
from typing import NamedTuple

import torch
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
    #: name of each adjacent matrix -> |w_j|^2 of its channels, float64, of gamma's shape or, for
    #: experts that share gamma, with a leading axis
    matrices: dict[str, Tensor]
    shared: bool  #: True if the matrices are branches that read one vector


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
    balance: float | None  #: None without any matrix
    agreement: float | None  #: None for less than two matrices
    folds: bool  #: True if matrices can absorb it
    why: str  #: reason why they cannot, or ''
    matrices: tuple[str, ...]  #: names of the adjacent matrices


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
        balance=_balance(gamma.view(vector.stored.shape), vector.matrices),
        agreement=_agreement(vector),
        folds=not vector.why,
        why=vector.why,
        matrices=tuple(vector.matrices),
    )


def _depth(name: str) -> int | None:
    """Return the first number in a name."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else None


def _share(mask: Tensor) -> float:
    return mask.double().mean().item()


def _balance(gamma: Tensor, matrices: dict[str, Tensor]) -> float | None:
    if not matrices:
        return None
    sums = [_per_entry(squares, gamma) for squares in matrices.values()]
    total = reduce(torch.add, sums)
    mask = (gamma != 0) & (total > 0)
    if not mask.any():
        return None
    ratio = gamma[mask].square() / total[mask]
    return ratio.log().quantile(0.5).item()


def _per_entry(squares: Tensor, gamma: Tensor) -> Tensor:
    """Return sums of gamma's shape, over the experts and heads that share it."""
    while squares.ndim > gamma.ndim:
        squares = squares.sum(0)  # experts
    heads: Tensor = squares.unflatten(-1, (-1, gamma.shape[-1]))  # (..., heads, d_head)
    return heads.sum(-2)


def _agreement(vector: StoredVector) -> float | None:
    """Return the agreement of the branches, without channels that one of them does not read."""
    if len(vector.matrices) < 2 or not vector.shared:
        return None
    branches = [_per_entry(each, vector.stored).flatten() for each in vector.matrices.values()]
    squares = torch.stack(branches)  # (branches, channels)
    logs = squares[:, squares.gt(0).all(0)].log()
    centered = logs - logs.mean(-1, keepdim=True)
    varying = [log for log in centered if log.any()]
    correlations = [_cosine(a, b) for a, b in combinations(varying, 2)]
    return sum(correlations) / len(correlations) if correlations else None


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))
