"""Trace and squared Frobenius norm from random probes."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from lightning_sv.curvature.product import Estimate, Product
from lightning_sv.curvature.vectors import Basis, inner, norm, rademacher, rounding, seeded


@dataclass(frozen=True)
class Moments:
    """Sums over the eigenvalues.

    Attributes:
        trace: sum of lambda
        squared_frobenius: sum of lambda^2, ||H||_F^2
    """

    trace: Estimate
    squared_frobenius: Estimate


def hutchinson(product: Product, n_probes: int = 30, *, generator: torch.Generator | None = None) -> Moments:
    """||H||_F^2 = E[||H v||^2] and tr H = E[v^T H v] over random signs v, from the same products.

    Hutchinson 1990 for the trace; the Frobenius norm is the trace of H^2. The error is the standard
    error of the mean. It falls as 1 / sqrt(n_probes): the variance of v^T H v is twice the squared
    off-diagonal of H.

    Args:
        product: v -> H v
        n_probes: products, at least 2
        generator: of the probes; None for seed 0

    Raises:
        ValueError: fewer than 2 probes, which have no standard error
    """
    if n_probes < 2:
        raise ValueError(f"n_probes of hutchinson is {n_probes}; at least 2 are needed for a standard error.")
    return _moments(product, Basis(product.parameters, 0), [], n_probes, seeded(generator))


def hutch_plus_plus(product: Product, n_products: int = 30, *, generator: torch.Generator | None = None) -> Moments:
    """Trace and squared Frobenius norm, exact on the range of a sketch of H and by probes outside it.

    With Q an orthonormal basis of H S, S random signs, and v' = (I - Q Q^T) v,

        tr H = tr(Q^T H Q) + E[v'^T H v'],    ||H||_F^2 = ||H Q||_F^2 + E[||H v'||^2].

    Hutch++ (arXiv:2010.09649, algorithm 1) for the trace; the second line is the same split of tr(H^2),
    at no further product. Better than `hutchinson` where few eigenvalues dominate, as in a Hessian;
    a third of the products each for H S, H Q and probes, n_products / 3 vectors of memory. The error is
    the standard error over the probes, given Q.

    Args:
        product: v -> H v
        n_products: products at most, at least 6
        generator: of sketch and probes; None for seed 0

    Raises:
        ValueError: fewer than 6 products, which leave no standard error
    """
    if n_products < 6:
        raise ValueError(f"n_products of hutch_plus_plus is {n_products}; at least 6 are needed for a standard error.")
    generator = seeded(generator)
    n_sketch = n_products // 3
    basis = Basis(product.parameters, n_sketch)
    for _ in range(n_sketch):
        image = product(rademacher(product.parameters, generator))
        rest = basis.reject(image)
        length = norm(rest)
        if length > 100 * rounding(product.parameters) * norm(image):  # else it is in the basis already
            basis.append(rest, length)
    images = [product(basis[i]) for i in range(len(basis))]
    exact = [(inner(basis[i], image), inner(image, image)) for i, image in enumerate(images)]
    return _moments(product, basis, exact, n_products - 2 * n_sketch, generator, spent=n_sketch + len(basis))


def _moments(
    product: Product,
    basis: Basis,
    exact: Sequence[tuple[float, float]],
    n_probes: int,
    generator: torch.Generator,
    spent: int = 0,
) -> Moments:
    """Exact parts on the basis plus means over probes orthogonal to it."""
    samples = []
    for _ in range(n_probes):
        probe = basis.reject(rademacher(product.parameters, generator))
        image = product(probe)
        samples.append((inner(probe, image), inner(image, image)))
    if not all(map(math.isfinite, chain(*exact, *samples))):  # overflow in a product: there is no answer
        nothing = Estimate(math.nan, math.nan, spent + n_probes)
        return Moments(nothing, nothing)
    trace, square = (
        Estimate(
            math.fsum(part[k] for part in exact) + statistics.fmean(sample[k] for sample in samples),
            statistics.stdev(sample[k] for sample in samples) / math.sqrt(n_probes),
            spent + n_probes,
        )
        for k in (0, 1)
    )
    return Moments(trace, square)
