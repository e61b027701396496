"""The numbers of one scale vector, and of the matrices beside it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError

#: of the median size of a vector's entries: below the first a channel is called dead, above the second an outlier
DEAD, OUTLIER = 0.05, 8.0
#: of numbers in a block
BLOCK = 2**20

#: (leading indices, first row, row after the last) -> these rows of a matrix
ReadRows = Callable[[tuple[int, ...], int, int], Tensor]


@dataclass(frozen=True)
class StoredVector:
    """A scale vector as a file has it.

    Attributes:
        name: of the parameter, or of our module
        role: 'input' or 'output'
        stored: gamma - origin, in the dtype it is kept in
        origin: 1 where the norm multiplies by 1 + w, else 0
        folds: whether matrices can take it up
        why: they cannot, or ''
        matrices: name of each matrix beside it -> sum of squares of what each of its channels is multiplied with,
            float64, of gamma's shape or, for experts that share gamma, with their axis before it
        shared: the matrices are branches that read one vector
    """

    name: str
    role: str
    stored: Tensor
    origin: float
    folds: bool
    why: str
    matrices: dict[str, Tensor]
    shared: bool

    @property
    def depth(self) -> int | None:
        """Number of its layer; None outside the layers."""
        return next((int(word) for word in self.name.split(".") if word.isdigit()), None)


@dataclass(frozen=True)
class VectorStatistics:
    """What is shown of a scale vector gamma.

    Attributes:
        name: of the parameter, or of our module
        depth: number of its layer; None outside the layers
        role: 'input' or 'output'
        dtype: in which it is kept
        size: number of its entries
        mean: of gamma
        rms: of gamma
        smallest: of gamma
        largest: of gamma
        low: 5th percentile of gamma
        high: 95th percentile of gamma
        negative: share of entries below 0
        at_start: share that is 1 to the bit, where training begins
        distinct: number of different values
        dead: share below 5% of the median size
        outliers: share above 8 times the median size
        balance: median over channels j of ln(gamma_j^2 / |w_j|^2), |w_j|^2 over all matrices beside it; None without
        agreement: mean correlation, over pairs of branches that read the vector, of ln |w_j|; None with less than two
        folds: whether matrices can take it up
        why: they cannot, or ''
        matrices: names of those beside it
    """

    name: str
    depth: int | None
    role: str
    dtype: str
    size: int
    mean: float
    rms: float
    smallest: float
    largest: float
    low: float
    high: float
    negative: float
    at_start: float
    distinct: int
    dead: float
    outliers: float
    balance: float | None
    agreement: float | None
    folds: bool
    why: str
    matrices: tuple[str, ...]


def statistics(vector: StoredVector) -> VectorStatistics:
    """Return the numbers of a vector.

    Raises:
        ConfigError: it has entries that are no finite numbers
    """
    stored = vector.stored.double().flatten()
    gamma = stored + vector.origin
    if not gamma.isfinite().all():
        raise ConfigError(f"{vector.name} has entries that are not finite; the model is broken.")
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


def _share(found: Tensor) -> float:
    return found.double().mean().item()


def _balance(gamma: Tensor, matrices: dict[str, Tensor]) -> float | None:
    if not matrices:
        return None
    total = sum(_like(squares, gamma) for squares in matrices.values())
    assert isinstance(total, Tensor)
    there = (gamma != 0) & (total > 0)
    return (gamma[there].square() / total[there]).log().quantile(0.5).item() if there.any() else None


def _like(squares: Tensor, gamma: Tensor) -> Tensor:
    """Sum over what shares gamma: experts before its axes, heads within them."""
    while squares.ndim > gamma.ndim:
        squares = squares.sum(0)
    heads: Tensor = squares.unflatten(-1, (-1, gamma.shape[-1]))
    return heads.sum(-2)


def _agreement(vector: StoredVector) -> float | None:
    """Mean correlation of the branches' ln |w_j|; channels that some branch does not read are left out."""
    branches = [_like(squares, vector.stored).flatten() for squares in vector.matrices.values()]
    if len(branches) < 2 or not vector.shared:
        return None
    there = torch.stack(branches).gt(0).all(0)
    logs = [branch[there].log() for branch in branches]
    logs = [log - log.mean() for log in logs]
    pairs = [float(a @ b / (a.norm() * b.norm())) for a, b in combinations(logs, 2) if a.any() and b.any()]
    return sum(pairs) / len(pairs) if pairs else None


def channel_squares(read: ReadRows, shape: tuple[int, ...], axis: int, widths: tuple[int, ...]) -> list[Tensor]:
    r"""||w_j||^2 = \sum_i W_ij^2 of the channels j along `axis`, for each of the matrices that a weight holds.

    Args:
        read: gives rows of the last two axes
        shape: of the weight, (*lead, rows, columns)
        axis: -1 or -2, along which the channels lie
        widths: along the other axis, of the matrices that lie there one after the other

    Returns:
        for each width (*lead, channels), float64
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
