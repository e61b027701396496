"""Statistics of one scale vector and its matrices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError

#: thresholds of dead and outlier channels, relative to the median size of a vector's entries
DEAD, OUTLIER = 0.05, 8.0
#: entries per block
BLOCK = 2**20

#: (leading indices, first row, row after the last) -> these rows of a matrix
ReadRows = Callable[[tuple[int, ...], int, int], Tensor]


@dataclass(frozen=True)
class StoredVector:
    """A scale vector as stored in a file."""

    name: str  #: name of the parameter, or of our module
    role: str  #: 'input' or 'output'
    stored: Tensor  #: gamma - origin, in the stored dtype
    origin: float  #: 1 if the norm multiplies by 1 + w, else 0
    folds: bool  #: True if matrices can absorb it
    why: str  #: reason why they cannot, or ''
    #: name of each adjacent matrix -> sum of squares of the weights of each channel, float64, of gamma's shape or,
    #: for experts that share gamma, with a leading axis
    matrices: dict[str, Tensor]
    shared: bool  #: True if the matrices are branches that read one vector

    @property
    def depth(self) -> int | None:
        """Number of its layer; None outside the layers."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), None)


@dataclass(frozen=True)
class VectorStatistics:
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
    #: median over channels j of ln(gamma_j^2 / |w_j|^2), |w_j|^2 over all adjacent matrices; None without any
    balance: float | None
    #: mean correlation of ln |w_j| over pairs of branches that read the vector; None for less than two
    agreement: float | None
    folds: bool  #: True if matrices can absorb it
    why: str  #: reason why they cannot, or ''
    matrices: tuple[str, ...]  #: names of the adjacent matrices


def statistics(vector: StoredVector) -> VectorStatistics:
    """Return the statistics of a vector.

    Raises:
        ConfigError: an entry is not finite
    """
    stored = vector.stored.double().flatten()
    gamma = stored + vector.origin
    if not gamma.isfinite().all():
        raise ConfigError(f"{vector.name} has entries that are not finite; the model has diverged.")
    size, median = gamma.abs(), gamma.abs().quantile(0.5)
    return VectorStatistics(
        name=vector.name,
        depth=vector.depth,
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
        folds=vector.folds,
        why=vector.why,
        matrices=tuple(vector.matrices),
    )


def _share(mask: Tensor) -> float:
    return mask.double().mean().item()


def _balance(gamma: Tensor, matrices: dict[str, Tensor]) -> float | None:
    if not matrices:
        return None
    total = sum(_like(squares, gamma) for squares in matrices.values())
    assert isinstance(total, Tensor)
    mask = (gamma != 0) & (total > 0)
    return (gamma[mask].square() / total[mask]).log().quantile(0.5).item() if mask.any() else None


def _like(squares: Tensor, gamma: Tensor) -> Tensor:
    """Sum over experts (leading axes) and heads that share gamma."""
    while squares.ndim > gamma.ndim:
        squares = squares.sum(0)
    heads: Tensor = squares.unflatten(-1, (-1, gamma.shape[-1]))
    return heads.sum(-2)


def _agreement(vector: StoredVector) -> float | None:
    """Return the mean correlation of the branches' ln |w_j|, without channels that a branch does not read."""
    branches = [_like(squares, vector.stored).flatten() for squares in vector.matrices.values()]
    if len(branches) < 2 or not vector.shared:
        return None
    mask = torch.stack(branches).gt(0).all(0)
    logs = [branch[mask].log() for branch in branches]
    logs = [log - log.mean() for log in logs]
    pairs = [float(a @ b / (a.norm() * b.norm())) for a, b in combinations(logs, 2) if a.any() and b.any()]
    return sum(pairs) / len(pairs) if pairs else None


def channel_squares(read: ReadRows, shape: tuple[int, ...], axis: int, widths: tuple[int, ...]) -> list[Tensor]:
    r"""Return ||w_j||^2 = \sum_i W_ij^2 of the channels j along `axis`, for each matrix in a weight.

    Args:
        read: function that returns rows of the last two axes
        shape: shape of the weight, (*lead, rows, columns)
        axis: -1 or -2, the axis of the channels
        widths: widths of the concatenated matrices along the other axis

    Returns:
        For each width (*lead, channels), float64.
    """
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    bounds = list(pairwise(accumulate(widths, initial=0)))
    out = [torch.zeros(*lead, shape[axis], dtype=torch.float64) for _ in widths]
    for index in product(*map(range, lead)):
        if axis == -1:
            for total, (low, high) in zip(out, bounds, strict=True):
                for start, end in _blocks(low, high, columns):
                    total[index] += read(index, start, end).float().square().sum(0)
        else:
            for start, end in _blocks(0, rows, columns):
                squares = read(index, start, end).float().square()
                for total, (low, high) in zip(out, bounds, strict=True):
                    total[index][start:end] = squares[:, low:high].sum(1)
    return out


def _blocks(low: int, high: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, math.ceil(BLOCK / max(1, columns)))
    return ((start, min(start + step, high)) for start in range(low, high, step))
