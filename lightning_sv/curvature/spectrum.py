"""Largest eigenvalue by the Lanczos method, trace and squared Frobenius norm from random probes."""

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_sv.curvature.hvp import Estimate, Product
from lightning_sv.curvature.vectors import (
    Basis,
    gaussian,
    inner,
    norm,
    rademacher,
    rounding,
    seeded,
    size,
)


def lanczos(
    product: Product,
    n_steps: int = 30,
    *,
    rtol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return lambda_max of H, for a Hessian the sharpness.

    It is the largest eigenvalue of Q^T H Q, with Q a basis of {v, Hv, H^2 v, ...}. Lanczos 1950;
    Golub and Van Loan, chapter 10. An eigenvalue of H lies within the error r = ||H y - theta y||
    of the value theta with Ritz vector y (Parlett, The Symmetric Eigenvalue Problem, section 4.5);
    theta is never above lambda_max, and usually much closer to it: r^2 over the gap. It is only
    likely that the eigenvalue is the largest one: a start vector almost orthogonal to its
    eigenvector converges to a neighbour first. Stopping therefore requires two accurate steps in a
    row. Full reorthogonalization avoids ghost eigenvalues and needs n_steps
    vectors of memory. The error also has the largest difference of q_i^T H q_j and q_j^T H q_i of
    successive vectors in the basis. It is 0 up to rounding if the map is symmetric; P^-1 H is not,
    so use P^-1/2 H P^-1/2, which has the same eigenvalues.

    Args:
        product: v -> H v
        n_steps: maximum number of products, at least 1
        rtol: stop when the error is at most rtol |theta|, twice in a row; 0 to run all steps
        generator: generator of the start vector; None for seed 0

    Returns:
        lambda_max with its error, nan if a product is not finite.
    """
    n_steps = min(n_steps, size(product.parameters))
    eps = rounding(product.parameters)
    basis = Basis(product.parameters, n_steps)
    start = gaussian(product.parameters, seeded(generator))
    basis.append(start, norm(start))
    # Q^T H Q is tridiagonal: these entries, and those above and below them
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    asymmetry = 0.0
    accurate_steps = 0
    while True:
        image = product(basis[-1])
        entry = inner(basis[-1], image)
        if not math.isfinite(entry):  # overflow
            return Estimate(math.nan, math.nan, len(basis))
        if off_diagonal:
            above = inner(basis[-2], image)
            asymmetry = max(asymmetry, abs(above - off_diagonal[-1]))
        diagonal.append(entry)

        remainder = basis.reject(image)
        beta = norm(remainder)
        ritz = _largest_ritz_value(diagonal, off_diagonal, beta, eps)
        is_accurate = ritz.error <= rtol * abs(ritz.theta)
        accurate_steps = accurate_steps + 1 if is_accurate else 0
        # A remainder of rounding size: the basis spans an invariant subspace, so its eigenvalues
        # are exact.
        is_invariant = beta <= ritz.rounding
        if accurate_steps == 2 or len(basis) == n_steps or is_invariant:
            return Estimate(ritz.theta, ritz.error + asymmetry, len(basis))
        off_diagonal.append(beta)
        basis.append(remainder, beta)


class _RitzValue(NamedTuple):
    """An eigenvalue theta of Q^T H Q, its error, and the rounding error of all of them."""

    theta: float
    error: float
    rounding: float


def _largest_ritz_value(
    diagonal: list[float], off_diagonal: list[float], beta: float, eps: float
) -> _RitzValue:
    """Return the largest eigenvalue of a tridiagonal matrix; beta is the remainder's length."""
    main = torch.tensor(diagonal, dtype=torch.float64)
    off = torch.tensor(off_diagonal, dtype=torch.float64)
    theta, vectors = torch.linalg.eigh(main.diag() + off.diag(1) + off.diag(-1))
    rounding_error = (eps * theta.abs().max()).item()
    residual = beta * vectors[-1, -1].abs().item()
    return _RitzValue(theta[-1].item(), residual + rounding_error, rounding_error)


@dataclass(frozen=True)
class Moments:
    """Sums over the eigenvalues.

    Attributes:
        trace: sum of lambda
        squared_frobenius: sum of lambda^2, ||H||_F^2
    """

    trace: Estimate
    squared_frobenius: Estimate


def hutchinson(
    product: Product, n_probes: int = 30, *, generator: torch.Generator | None = None
) -> Moments:
    """Estimate ||H||_F^2 = E[||H v||^2] and tr H = E[v^T H v] over random signs v.

    Hutchinson 1990 for the trace; the Frobenius norm is the trace of H^2, from the same products.
    The error is the standard error of the mean. It falls as 1 / sqrt(n_probes): the variance of v^T
    H v is twice the squared off-diagonal of H.

    Args:
        product: v -> H v
        n_probes: number of products, at least 2
        generator: generator of the probes; None for seed 0
    """
    generator = seeded(generator)
    traces = []
    squares = []
    for _ in range(n_probes):
        probe = rademacher(product.parameters, generator)
        image = product(probe)
        traces.append(inner(probe, image))
        squares.append(inner(image, image))
    if not all(map(math.isfinite, traces + squares)):  # overflow
        undefined = Estimate(math.nan, math.nan, n_probes)
        return Moments(undefined, undefined)
    return Moments(_mean(traces), _mean(squares))


def _mean(samples: list[float]) -> Estimate:
    """Return the mean with its standard error."""
    n = len(samples)
    return Estimate(statistics.fmean(samples), statistics.stdev(samples) / math.sqrt(n), n)
