"""Preconditioning of a branch's gradient flow by its scale vectors, from W and its two gammas.

Notation of the paper, Section 3.4: the branch multiplies by A = diag(u) W diag(v), with u = gamma_out
(d_out,), v = gamma_in (d_in,) and W (d_out, d_in); None stands for fixed ones. Under `dnp`, a norm
between W and u makes A's flow depend on more than these tensors (end of Section 3.4); the results then
ignore that norm. Functions take one matrix; loop over experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sv.curvature.hvp import Estimate
from lightning_sv.curvature.lanczos import Extremes, lanczos
from lightning_sv.curvature.vectors import Vector
from lightning_sv.errors import ConfigError

#: Default fractions of the quantiles in `scale_field`.
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class GammaFigures:
    """Statistics of one scale vector, for any parameterization.

    Attributes:
        drift: rms of gamma - 1, zero at initialization
        rms: ||gamma|| / sqrt(d), equal to |beta| under `or`
        geometric_mean: exp(mean log |gamma|), equal to e^beta under `er`
        dead: fraction of entries with |gamma| below the threshold
        negative: fraction of entries below 0
    """

    drift: float
    rms: float
    geometric_mean: float
    dead: float
    negative: float


def gamma_figures(gamma: Tensor, dead_below: float = 0.01) -> GammaFigures:
    """Return statistics of one scale vector; rms and geometric mean track beta for `direct`, `or` and `er`.

    Args:
        gamma: a scale vector, of any shape
        dead_below: threshold of a dead entry as a fraction of the vector's rms (our choice)
    """
    g = gamma.detach().double()
    rms = g.square().mean().sqrt()
    figures = (
        (g - 1).square().mean().sqrt(),
        rms,
        g.abs().log().mean().exp(),
        (g.abs() <= dead_below * rms).double().mean(),
        (g < 0).double().mean(),
    )
    return GammaFigures(*torch.stack(figures).tolist())


@dataclass(frozen=True)
class ScaleField:
    """Distribution of the absolute entries of u v^T, the scale field that multiplies W.

    Attributes:
        smallest: min |u_i v_j|
        largest: max |u_i v_j|
        spread: largest / smallest; infinite with a dead entry
        log_std: standard deviation of log |u_i v_j|, 0 for a uniform field; nan with an entry of 0
        quantiles: fraction -> smallest value that at least this fraction of the entries does not exceed
    """

    smallest: float
    largest: float
    spread: float
    log_std: float
    quantiles: dict[float, float]


def scale_field(
    gamma_in: Tensor | None, gamma_out: Tensor | None, fractions: Sequence[float] = QUANTILES
) -> ScaleField:
    """Return spread and distribution of the scale field u v^T (paper, unified form, Section 3.4).

    The field is not built: extremes and log variance are computed from u and v, quantiles by
    counting pairs in sorted vectors.

    Args:
        gamma_in: (d_in,) or None
        gamma_out: (d_out,) or None
        fractions: fractions of the quantiles, which are nearly all of the cost; () for none
    """
    u, v = _ones_or(gamma_out), _ones_or(gamma_in)
    smallest, largest = (u.min() * v.min()).item(), (u.max() * v.max()).item()
    n = u.numel() * v.numel()
    ranks = (torch.tensor(fractions, dtype=torch.float64) * n).ceil().clamp(1, n)
    log_std = (u.log().var(correction=0) + v.log().var(correction=0)).sqrt()  # u and v vary independently
    return ScaleField(
        smallest,
        largest,
        largest / smallest if smallest else float("inf"),
        log_std.item(),
        dict(zip(fractions, _smallest(u, v, ranks).tolist() if fractions else [], strict=True)),
    )


def column_eigenvalues(weight: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of P_j = gamma_j^2 I + w_j w_j^T of each column of W (paper, Section 2.1).

    P_j preconditions the flow of column j of W diag(gamma). Its condition number is high / low.

    Args:
        weight: (..., d_out, d_in)
        gamma: (..., d_in)

    Returns:
        low, gamma_j^2, with multiplicity d_out - 1, and high, gamma_j^2 + ||w_j||^2, each (..., d_in).
    """
    low = gamma.detach().square()
    return low, low + weight.detach().square().sum(-2)


class FlowPreconditioner:
    """P of A's gradient flow dA/dt = -P(dL/dA), A = diag(u) W diag(v), if W, u and v follow their flows.

        P(X) = (u v^T)^2 * X + C * colsum(C * X) + R * rowsum(R * X),    C = diag(u) W,  R = W diag(v)

    with entrywise products; the second term requires that v trains, the third that u trains. It is J J^T
    of the map (u, W, v) -> A (paper, Section 3.4). Without u its blocks are the P_j of Section 2.1; with
    both it is the flow in the proof of the DP theorem. The parameterization of gamma (`or`, `er`) is not included.

    Args:
        weight: (d_out, d_in)
        gamma_in: (d_in,) or None
        gamma_out: (d_out,) or None
    """

    def __init__(self, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None):
        weight = weight.detach()
        self.parameters: Vector = (weight,)
        u = torch.ones_like(weight[:, 0]) if gamma_out is None else gamma_out.detach()
        v = torch.ones_like(weight[0]) if gamma_in is None else gamma_in.detach()
        self._field = torch.outer(u, v).square()
        self._by_column = None if gamma_in is None else weight * u.unsqueeze(1)
        self._by_row = None if gamma_out is None else weight * v

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return P(X); the vector has one tensor X, (d_out, d_in)."""
        (x,) = vector
        out = self._field * x
        for factor, axis in ((self._by_column, 0), (self._by_row, 1)):
            if factor is not None:
                out += factor * (factor * x).sum(axis, keepdim=True)
        return (out,)


def eigenvalue_range(
    weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, *, n_steps: int = 20, rtol: float = 1e-3
) -> Extremes:
    """Return the extreme eigenvalues of `FlowPreconditioner`; 1 and 1 without scale vectors.

    With one vector they have a closed form, `column_eigenvalues`. With both, the largest is computed by `lanczos`,
    which needs n_steps matrices of W's size, and the smallest is the midpoint of an interval that contains it: P is
    the diagonal (u_i v_j)^2 plus d_in + d_out positive terms of rank one, so by Weyl's inequalities its
    smallest eigenvalue lies between the first and the (d_in + d_out + 1)-th smallest entry of that diagonal.

    Args:
        weight: (d_out, d_in)
        gamma_in: (d_in,) or None
        gamma_out: (d_out,) or None
        n_steps: maximum number of products, see `lanczos`
        rtol: relative error at which to stop, see `lanczos`

    Raises:
        ConfigError: a weight that is not a matrix
    """
    if weight.dim() != 2:
        raise ConfigError(f"the weight has shape {tuple(weight.shape)}; expected one matrix (d_out, d_in).")
    if gamma_out is None or gamma_in is None:
        if gamma_in is None:
            weight, gamma_in = weight.T, gamma_out
        if gamma_in is None:
            return Extremes(Estimate(1.0, 0.0, 0), Estimate(1.0, 0.0, 0))
        low, high = column_eigenvalues(weight, gamma_in)
        least = (low if len(weight) > 1 else high).min().item()
        return Extremes(Estimate(high.max().item(), 0.0, 0), Estimate(least, 0.0, 0))
    largest = lanczos(FlowPreconditioner(weight, gamma_in, gamma_out), n_steps, rtol=rtol).largest
    u, v = _ones_or(gamma_out), _ones_or(gamma_in)
    last = min(sum(weight.shape) + 1, weight.numel())
    bounds = _smallest(u, v, torch.tensor([1.0, last], dtype=torch.float64)).square()
    low_end, high_end = bounds.tolist()
    if sum(weight.shape) >= weight.numel():  # one row or column: Weyl gives no upper bound
        high_end = largest.value + largest.error
    return Extremes(largest, Estimate((low_end + high_end) / 2, (high_end - low_end) / 2, 0))


def _ones_or(gamma: Tensor | None) -> Tensor:
    return torch.ones(1, dtype=torch.float64) if gamma is None else gamma.detach().double().abs().cpu()


def _smallest(u: Tensor, v: Tensor, ranks: Tensor) -> Tensor:
    """Return the rank-th smallest |u_i v_j| for each rank (from 1) by bisection, to 2^-64 of the largest."""
    short, long = (u, v) if len(u) < len(v) else (v, u)
    long = long.sort().values
    low, high = torch.zeros_like(ranks), (short.max() * long[-1]).expand_as(ranks)
    for _ in range(64):
        middle = (low + high) / 2
        below = torch.searchsorted(long, middle.unsqueeze(1) / short, right=True).sum(1)
        enough = below >= ranks
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high
