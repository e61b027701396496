"""Influence of sharpness on descent: the expansion, the bound of the GD term, and six noise models.

One step of SGD on ½‖γ ⊙ w − a*‖² in θ = (w, γ), with H, C of shape (2d, 2d):

    E L(θ − η(∇L + ξ)) = Q + η²/2 P + o(η²),  Q = L − η‖∇L‖² + η²/2 ∇Lᵀ H ∇L,  P = E ξᵀHξ = Tr(H C),
     C = E ξξᵀ
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_sv.theory.claims.base import Finding, claim
from lightning_sv.theory.series import Array

_SOURCE = 'Appendix C.2, "How Hessian sharpness influences loss descent"'
_STATES = "2,000 random states, d = 4"
COUNT = 2000
_descent = partial(claim, "descent", _SOURCE)
SIGMA2 = 0.7  # σ² of the models


class Point(NamedTuple):
    """A training state, with loss, gradient and Hessian in θ = (w, γ)."""

    theta: Array  #: (2d,)
    target: Array  #: a*, (d,)

    def loss(self, theta: Array | None = None) -> Array:
        """Return L at θ, or at other points of shape (..., 2d)."""
        w, gamma = np.split(self.theta if theta is None else theta, 2, axis=-1)
        return np.asarray(0.5 * ((w * gamma - self.target) ** 2).sum(-1))

    @property
    def jacobian(self) -> Array:
        """∂a/∂θ of a = γ ⊙ w: (diag(γ), diag(w)), shape (d, 2d)."""
        w, gamma = np.split(self.theta, 2)
        return np.hstack([np.diag(gamma), np.diag(w)])

    @property
    def error(self) -> Array:
        """Return e = a − a*, (d,)."""
        w, gamma = np.split(self.theta, 2)
        return np.asarray(w * gamma - self.target)

    @property
    def gradient(self) -> Array:
        """∇L = Jᵀe, (2d,)."""
        return np.asarray(self.jacobian.T @ self.error)

    @property
    def hessian(self) -> Array:
        """H = JᵀJ + the mixed second derivatives e_i of a_i, (2d, 2d)."""
        d = self.target.size
        mixed = np.zeros((2 * d, 2 * d))
        mixed[np.arange(d), d + np.arange(d)] = mixed[d + np.arange(d), np.arange(d)] = self.error
        return np.asarray(self.jacobian.T @ self.jacobian + mixed)

    def after_descent(self, rate: float) -> float:
        """Return Q, the expansion of L after one step of gradient descent."""
        g = self.gradient
        return float(self.loss() - rate * g @ g + rate**2 / 2 * g @ self.hessian @ g)

    def expected_loss(self, rate: float, covariance: Array) -> float:
        """Return E L(θ − η(∇L + ξ)), exact, for noise with the given covariance.

        ξ = ±√n √λ_k v_k with equal probabilities.
        """
        values, vectors = np.linalg.eigh(covariance)
        noise = (vectors * np.sqrt(values.size * np.maximum(values, 0))).T
        both = np.concatenate([noise, -noise])
        return float(self.loss(self.theta - rate * (self.gradient + both)).mean())


def noise_term(hessian: Array, covariance: Array) -> float:
    """Return P = E ξᵀHξ = Tr(H C)."""
    return float(np.sum(hessian * covariance))


def random_point(rng: np.random.Generator, d: int = 4) -> Point:
    """Return a point with standard normal θ and a*."""
    return Point(rng.standard_normal(2 * d), rng.standard_normal(d))


def near_interpolation(rng: np.random.Generator) -> Point:
    """Return a point with standard normal θ, d = 4, and a* at a distance of 0.01 from γ ⊙ w.

    The direction of a* from there is random.
    """
    w, gamma, away = rng.standard_normal((3, 4))
    target = w * gamma + 0.01 * away / np.linalg.norm(away)
    return Point(np.concatenate([w, gamma]), target)


def _points(rng: np.random.Generator) -> Iterator[Point]:
    """Yield `COUNT` random states; a check may draw from the same generator between them."""
    for _ in range(COUNT):
        yield random_point(rng)


def _points_near_interpolation(rng: np.random.Generator) -> Iterator[Point]:
    """Yield `COUNT` random states with ‖e‖ = 0.01."""
    for _ in range(COUNT):
        yield near_interpolation(rng)


def _random_covariance(rng: np.random.Generator, trace: float) -> Array:
    """Return a random covariance (2d, 2d) with this trace, d = 4.

    Its random rank makes it low-dimensional in most cases.
    """
    rank = int(rng.integers(1, 9))
    factor = rng.standard_normal((8, rank))
    covariance = factor @ factor.T
    return np.asarray(covariance * trace / np.trace(covariance))


def _squared_hessian(point: Point) -> float:
    """Return ‖H‖_F²."""
    return float((point.hessian**2).sum())


@_descent("expansion", "η from 0.001 to 0.02")
def _expansion() -> Finding:
    """E L(θ_(t+1)) = Q + (η²/2) P + o(η²)."""
    rng = np.random.default_rng(0)
    rates = np.geomspace(0.001, 0.02, 8)
    slopes = []
    for _ in range(20):
        point = random_point(rng)
        covariance = _random_covariance(rng, SIGMA2)
        noise = noise_term(point.hessian, covariance)
        rest = [
            abs(
                point.expected_loss(eta, covariance) - point.after_descent(eta) - eta**2 / 2 * noise
            )
            for eta in rates
        ]
        slopes.append(float(np.polyfit(np.log(rates), np.log(rest), 1)[0]))
    slope = min(slopes)
    note = (
        "exact expectation over two-point noise, 20 states: "
        "least slope of the remainder in η, on logarithmic axes"
    )
    return Finding("> 2", slope, None, slope > 2, note)


def _bound(point: Point, rate: float, sharpest: float) -> float:
    """Return L − η(1 − η λ_max/2)‖∇L‖²."""
    g = point.gradient
    return float(point.loss() - rate * (1 - rate * sharpest / 2) * (g @ g))


@_descent("GD term", "any state, any η")
def _gd_term() -> Finding:
    """Q ≤ L − η(1 − η λ_max/2)‖∇L‖²."""
    rng = np.random.default_rng(0)
    worst = -np.inf
    for point in _points(rng):
        eta = rng.uniform(0.01, 2)
        bound = _bound(point, eta, np.linalg.eigvalsh(point.hessian)[-1])
        worst = max(worst, (point.after_descent(eta) - bound) / (1 + abs(bound)))
    return Finding(
        "≤ 0",
        worst,
        None,
        worst <= 1e-12,
        f"{_STATES}, η from 0.01 to 2; largest excess over the bound",
    )


@_descent("GD step", "η < 2/λ_max", expected="fails")
def _true_step() -> Finding:
    """L(θ − η∇L) ≤ L − η(1 − η λ_max/2)‖∇L‖², λ_max at θ."""
    # The descent lemma needs λ_max along the complete step, not only at its start, so the loss can
    # even rise.
    rng = np.random.default_rng(0)
    excess = []
    rises = 0
    for point in _points(rng):
        sharpest = np.linalg.eigvalsh(point.hessian)[-1]
        eta = rng.uniform(0.05, 0.95) * 2 / sharpest
        after = float(point.loss(point.theta - eta * point.gradient))
        excess.append(after > _bound(point, eta, sharpest) + 1e-12)
        rises += int(after > point.loss())
    share = float(np.mean(excess))
    note = (
        f"share of {COUNT:,} random states; the loss rises in {rises / COUNT:.0%}, "
        "though η λ_max < 2 where it starts"
    )
    return Finding(0.0, share, None, share == 0, note)


@_descent("1 to 3 bounded", "models of E‖ξ‖²: σ², σ_0² + σ_1²‖∇L‖², σ² L")
def _bounded() -> Finding:
    """P ≤ E‖ξ‖² λ_max."""
    # One claim: P and the bounds of the three models are proportional to E‖ξ‖², so all have the
    # same P / bound.
    rng = np.random.default_rng(0)
    shares = []
    gap = 0.0
    for point in _points(rng):
        values, vectors = np.linalg.eigh(point.hessian)
        bound = SIGMA2 * values[-1]
        shares.append(noise_term(point.hessian, _random_covariance(rng, SIGMA2)) / bound)
        along_sharpest = SIGMA2 * np.outer(vectors[:, -1], vectors[:, -1])
        gap = max(gap, abs(noise_term(point.hessian, along_sharpest) / bound - 1))
    worst = max(shares)
    note = f"{_STATES}: largest P / bound of random noise, its median {np.median(shares):.2f}; "
    note += f"noise along the sharpest direction reaches the bound within {gap:.0e}"
    return Finding("≤ 1", worst, None, worst <= 1 + 1e-12 and gap < 1e-10, note)


def _noise_term_equals(
    stated: Callable[[Point], Any], covariance: Callable[[Point], Any], points: Iterator[Point]
) -> Finding:
    """Check that P is the stated number if noise has this covariance.

    ∇²L as a covariance can have negative variances; the note has their share.
    """
    errors = []
    negative = []
    for point in points:
        c = covariance(point)
        p = float(stated(point))
        errors.append(abs(noise_term(point.hessian, c) - p) / p)
        values = np.linalg.eigvalsh(c)
        negative.append(max(0.0, -float(values[0])) / float(values[-1]))
    worst = max(errors)
    share = np.mean(np.array(negative) > 1e-12)
    note = f"{COUNT:,} states; negative variances in {share:.0%}, "
    note += "of which the most negative over the largest: "
    note += f"median {np.median(negative):.0e}, largest {max(negative):.2g}"
    return Finding(0.0, worst, worst, worst < 1e-10, note)


@_descent("4 isotropic", "C = σ² I")
def _isotropic() -> Finding:
    """P = σ² Tr ∇²L."""
    return _noise_term_equals(
        lambda point: SIGMA2 * np.trace(point.hessian),
        covariance=lambda point: SIGMA2 * np.eye(8),
        points=_points(np.random.default_rng(0)),
    )


@_descent("5 Hessian", "C = σ² ∇²L, at ‖e‖ = 0.01")
def _hessian() -> Finding:
    """P = σ² ‖∇²L‖_F²."""
    return _noise_term_equals(
        lambda point: SIGMA2 * _squared_hessian(point),
        covariance=lambda point: SIGMA2 * point.hessian,
        points=_points_near_interpolation(np.random.default_rng(0)),
    )


@_descent("6 loss, Hessian", "C = 2L ∇²L, at ‖e‖ = 0.01")
def _loss_and_hessian() -> Finding:
    """P = 2L ‖∇²L‖_F²."""
    return _noise_term_equals(
        lambda point: 2 * point.loss() * _squared_hessian(point),
        covariance=lambda point: 2 * point.loss() * point.hessian,
        points=_points_near_interpolation(np.random.default_rng(0)),
    )


@_descent("5 as printed", f"σ² = {SIGMA2}", expected="fails")
def _printed() -> Finding:
    """P ≃ ‖∇²L‖_F² where C = σ² ∇²L."""
    point = near_interpolation(np.random.default_rng(0))
    ratio = noise_term(point.hessian, SIGMA2 * point.hessian) / _squared_hessian(point)
    note = f"P over ‖H‖_F² with σ² = {SIGMA2}: the factor σ² is missing"
    return Finding(1.0, ratio, None, abs(ratio - 1) < 1e-6, note)


@_descent("5, 6 anywhere", _STATES, expected="fails")
def _no_covariance() -> Finding:
    """σ² ∇²L is a covariance."""
    points = _points(np.random.default_rng(0))
    share = float(np.mean([np.linalg.eigvalsh(point.hessian)[0] < -1e-9 for point in points]))
    note = f"share of {_STATES} where ∇²L has a negative eigenvalue"
    return Finding(0.0, share, None, share == 0, note)
