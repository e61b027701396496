"""Extreme eigenvalues by the Lanczos method (Lanczos 1950; Golub and Van Loan, chapter 10)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_sv.curvature.hvp import Estimate, Product
from lightning_sv.curvature.vectors import Basis, dimension, gaussian, inner, norm, rounding, seeded
from lightning_sv.errors import ConfigError


@dataclass(frozen=True)
class Extremes:
    """The two ends of a spectrum.

    Attributes:
        largest: lambda_max; of a Hessian, the sharpness in the subset
        smallest: lambda_min, the most negative one
    """

    largest: Estimate
    smallest: Estimate


def lanczos(
    product: Product,
    n_steps: int = 30,
    *,
    rtol: float = 1e-3,
    ends: Literal["largest", "smallest", "both"] = "largest",
    generator: torch.Generator | None = None,
) -> Extremes:
    """lambda_max and lambda_min of H: the extreme eigenvalues of Q^T H Q, Q a basis of {v, Hv, H^2 v, ...}.

    A value theta with Ritz vector y has an eigenvalue of H within its error r = ||H y - theta y||
    (Parlett, The Symmetric Eigenvalue Problem, section 4.5); theta never passes the true end, and is
    as a rule much nearer to it: r^2 over the gap. That the eigenvalue found is the extreme one is only
    likely: a start almost orthogonal to its vector settles on a neighbour for some steps, which is why
    two steps in a row must be near enough to stop. Full reorthogonalization: no ghost eigenvalues, and
    n_steps vectors of memory.

    Args:
        product: v -> H v
        n_steps: products at most
        rtol: stop when the error is at most rtol |theta| at the ends asked for, twice in a row; 0 to take
            every step
        ends: which ends must be that near; both are returned, each with its error
        generator: of the start; None for seed 0

    Returns:
        Both ends, nan where a product is not finite.

    Raises:
        ConfigError: n_steps below 1
    """
    if n_steps < 1:
        raise ConfigError(f"n_steps of lanczos is {n_steps}; it must be at least 1.")
    n_steps = min(n_steps, dimension(product.parameters))
    basis = Basis(product.parameters, n_steps)
    eps = rounding(product.parameters)
    start = gaussian(product.parameters, seeded(generator))
    basis.append(start, norm(start))
    diagonal: list[float] = []
    beside: list[float] = []
    near = 0
    wanted = {"largest": (-1,), "smallest": (0,), "both": (0, -1)}[ends]
    while True:
        image = product(basis[len(basis) - 1])
        diagonal.append(inner(basis[len(basis) - 1], image))
        if not math.isfinite(diagonal[-1]):  # overflow in the product: there is no answer
            nothing = Estimate(math.nan, math.nan, len(diagonal))
            return Extremes(nothing, nothing)
        rest = basis.reject(image)
        beta = norm(rest)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.tensor(beside, dtype=torch.float64)
            tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
        theta, ritz = torch.linalg.eigh(tridiagonal)
        floor = eps * theta.abs().max()
        errors = beta * ritz[-1].abs() + floor
        near = near + 1 if all(errors[i] <= rtol * theta[i].abs() for i in wanted) else 0
        # A rest of rounding size: the basis spans an invariant subspace, and its eigenvalues are H's.
        if near == 2 or len(basis) == n_steps or beta <= floor:
            break
        beside.append(beta)
        basis.append(rest, beta)
    largest, smallest = (Estimate(theta[i].item(), errors[i].item(), len(diagonal)) for i in (-1, 0))
    return Extremes(largest, smallest)
