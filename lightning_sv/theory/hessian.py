"""Hessian of ½‖γ ⊙ w − a*‖² in θ = (w, γ): closed forms, autograd's, and its effect on a step of SGD.

Paper, Appendix "Proof of Theorem (Benefits of wd)", the block H_i and its eigenvalues, trace and Frobenius
norm. Shapes: w, γ, a* are (..., d); the leading axes are independent states.

"How Hessian sharpness influences loss descent", with H, C of shape (2d, 2d):

    E L(θ − η(∇L + ξ)) = Q + η²/2 P + o(η²),  Q = L − η‖∇L‖² + η²/2 ∇Lᵀ H ∇L,  P = E ξᵀHξ = Tr(H C),  C = E ξξᵀ
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_sv.theory.dual import Array


class Sharpness(NamedTuple):
    """λ_max, trace and Frobenius norm of ∇²L, each of shape (...)."""

    lambda_max: Array
    trace: Array
    frobenius: Array


def sharpness(w: Array, gamma: Array, target: Array) -> Sharpness:
    """Return the sharpness from the 2x2 blocks H_i = [[γ_i², m_i], [m_i, w_i²]], m_i = 2 γ_i w_i − a*_i."""
    mixed = 2 * gamma * w - target
    largest = 0.5 * (gamma**2 + w**2 + np.sqrt((gamma**2 - w**2) ** 2 + 4 * mixed**2))
    return Sharpness(
        largest.max(-1),
        (gamma**2 + w**2).sum(-1),
        np.sqrt((gamma**4 + w**4 + 2 * mixed**2).sum(-1)),
    )


def dense_hessian(w: Array, gamma: Array, target: Array) -> Array:
    """Return ∇²L of one state by autograd, shape (2d, 2d), ordered (w, γ) as in the paper's block form."""
    import torch  # imported here, because it doubles the start time

    def loss(theta: torch.Tensor) -> torch.Tensor:
        first, second = theta.chunk(2)
        return 0.5 * (first * second - torch.tensor(target)).square().sum()

    return np.asarray(torch.func.hessian(loss)(torch.tensor(np.concatenate([w, gamma]))))


def dense_sharpness(hessian: Array) -> Sharpness:
    """Return the sharpness of a dense symmetric matrix."""
    eigenvalues = np.linalg.eigvalsh(hessian)
    return Sharpness(eigenvalues[-1], np.trace(hessian), np.sqrt((hessian**2).sum()))


@dataclass(frozen=True)
class Point:
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
        """Return E L(θ − η(∇L + ξ)), exact, for ξ = ±√n √λ_k v_k with equal probabilities and the given covariance."""
        values, vectors = np.linalg.eigh(covariance)
        noise = (vectors * np.sqrt(values.size * np.maximum(values, 0))).T
        both = np.concatenate([noise, -noise])
        return float(self.loss(self.theta - rate * (self.gradient + both)).mean())

    def one_sample_covariance(self) -> Array:
        """Return C of SGD on single samples, ∇ = Jᵀz⟨e, z⟩ with z uniform on the sphere of radius √d.

        From E[zzᵀ⟨e, z⟩²] = d/(d+2) (‖e‖² I + 2eeᵀ): C = Jᵀ(d/(d+2) ‖e‖² I + (d−2)/(d+2) eeᵀ)J.
        """
        d, e = self.target.size, self.error
        inner = d / (d + 2) * (e @ e) * np.eye(d) + (d - 2) / (d + 2) * np.outer(e, e)
        return np.asarray(self.jacobian.T @ inner @ self.jacobian)


def noise_term(hessian: Array, covariance: Array) -> float:
    """Return P = E ξᵀHξ = Tr(H C)."""
    return float(np.sum(hessian * covariance))


def random_point(rng: np.random.Generator, d: int = 4) -> Point:
    """Return a point with standard normal θ and a*."""
    return Point(rng.standard_normal(2 * d), rng.standard_normal(d))


def near_interpolation(rng: np.random.Generator, distance: float, d: int = 4) -> Point:
    """Return a point with standard normal θ and a* at this distance from γ ⊙ w in a random direction."""
    theta = rng.standard_normal(2 * d)
    away = rng.standard_normal(d)
    w, gamma = np.split(theta, 2)
    return Point(theta, w * gamma + distance * away / np.linalg.norm(away))
