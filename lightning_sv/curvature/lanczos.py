"""Largest eigenvalue by the Lanczos method (Lanczos 1950; Golub and Van Loan, chapter 10)."""

import math

import torch

from lightning_sv.curvature.hvp import Estimate, Product
from lightning_sv.curvature.vectors import Basis, dimension, gaussian, inner, norm, rounding, seeded
from lightning_sv.errors import ConfigError


def lanczos(
    product: Product,
    n_steps: int = 30,
    *,
    rtol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return lambda_max of H, for a Hessian the sharpness, from Q^T H Q with Q a basis of {v, Hv, H^2 v, ...}.

    An eigenvalue of H lies within the error r = ||H y - theta y|| of the value theta with Ritz vector y
    (Parlett, The Symmetric Eigenvalue Problem, section 4.5); theta is never above lambda_max, and
    usually much closer to it: r^2 over the gap. It is only likely that the eigenvalue is the largest one: a
    start vector almost orthogonal to its eigenvector converges to a neighbour first. Stopping therefore requires
    two accurate steps in a row. Full reorthogonalization avoids ghost eigenvalues and needs n_steps vectors of memory.

    Args:
        product: v -> H v
        n_steps: maximum number of products
        rtol: stop when the error is at most rtol |theta|, twice in a row; 0 to run all steps
        generator: generator of the start vector; None for seed 0

    Returns:
        lambda_max with its error, nan if a product is not finite.

    Raises:
        ConfigError: n_steps below 1
    """
    if n_steps < 1:
        raise ConfigError(f"n_steps of lanczos is {n_steps}; expected at least 1.")
    n_steps = min(n_steps, dimension(product.parameters))
    basis = Basis(product.parameters, n_steps)
    eps = rounding(product.parameters)
    start = gaussian(product.parameters, seeded(generator))
    basis.append(start, norm(start))
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    accurate_steps = 0
    while True:
        image = product(basis[len(basis) - 1])
        diagonal.append(inner(basis[len(basis) - 1], image))
        if not math.isfinite(diagonal[-1]):  # overflow
            return Estimate(math.nan, math.nan, len(diagonal))
        remainder = basis.reject(image)
        beta = norm(remainder)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if off_diagonal:
            off = torch.tensor(off_diagonal, dtype=torch.float64)
            tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
        theta, ritz = torch.linalg.eigh(tridiagonal)
        floor = eps * theta.abs().max()
        error = beta * ritz[-1, -1].abs() + floor
        accurate_steps = accurate_steps + 1 if error <= rtol * theta[-1].abs() else 0
        # A remainder of rounding size: the basis spans an invariant subspace, so its eigenvalues are exact.
        if accurate_steps == 2 or len(basis) == n_steps or beta <= floor:
            break
        off_diagonal.append(beta)
        basis.append(remainder, beta)
    return Estimate(theta[-1].item(), error.item(), len(diagonal))
