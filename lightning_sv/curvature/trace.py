"""Trace and squared Frobenius norm from random probes."""

import math
import statistics
from dataclasses import dataclass
from itertools import chain

import torch

from lightning_sv.curvature.hvp import Estimate, Product
from lightning_sv.curvature.vectors import inner, rademacher, seeded
from lightning_sv.errors import ConfigError


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
    """Estimate ||H||_F^2 = E[||H v||^2] and tr H = E[v^T H v] over random signs v.

    Hutchinson 1990 for the trace; the Frobenius norm is the trace of H^2, from the same products. The error is the
    standard error of the mean. It falls as 1 / sqrt(n_probes): the variance of v^T H v is twice the squared
    off-diagonal of H.

    Args:
        product: v -> H v
        n_probes: number of products, at least 2
        generator: generator of the probes; None for seed 0

    Raises:
        ConfigError: fewer than 2 probes, which have no standard error
    """
    if n_probes < 2:
        raise ConfigError(f"n_probes of hutchinson is {n_probes}; expected at least 2 for a standard error.")
    generator = seeded(generator)
    samples = []
    for _ in range(n_probes):
        probe = rademacher(product.parameters, generator)
        image = product(probe)
        samples.append((inner(probe, image), inner(image, image)))
    if not all(map(math.isfinite, chain(*samples))):  # overflow
        undefined = Estimate(math.nan, math.nan, n_probes)
        return Moments(undefined, undefined)
    trace, square = (
        Estimate(
            statistics.fmean(sample[k] for sample in samples),
            statistics.stdev(sample[k] for sample in samples) / math.sqrt(n_probes),
            n_probes,
        )
        for k in (0, 1)
    )
    return Moments(trace, square)
