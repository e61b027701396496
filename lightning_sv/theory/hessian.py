"""Closed forms of the Hessian of ½‖γ ⊙ w − a*‖² in (w, γ), and the same from autograd.

Paper, Appendix "Proof of Theorem (Benefits of wd)", the block H_i and its eigenvalues, trace and Frobenius
norm. Shapes: w, γ, a* are (..., d); the leading axes are independent states.
"""

from dataclasses import dataclass

import numpy as np

from lightning_sv.theory.dual import Array


@dataclass(frozen=True)
class Sharpness:
    """λ_max, trace and Frobenius norm of ∇²L, each of shape (...)."""

    lambda_max: Array
    trace: Array
    frobenius: Array


def sharpness(w: Array, gamma: Array, target: Array) -> Sharpness:
    """Sharpness figures from the 2x2 blocks H_i = [[γ_i², m_i], [m_i, w_i²]], m_i = 2 γ_i w_i − a*_i."""
    mixed = 2 * gamma * w - target
    largest = 0.5 * (gamma**2 + w**2 + np.sqrt((gamma**2 - w**2) ** 2 + 4 * mixed**2))
    return Sharpness(
        largest.max(-1),
        (gamma**2 + w**2).sum(-1),
        np.sqrt((gamma**4 + w**4 + 2 * mixed**2).sum(-1)),
    )


def dense_hessian(w: Array, gamma: Array, target: Array) -> Array:
    """∇²L of one state by autograd, shape (2d, 2d), ordered (w, γ) as in the paper's block form."""
    import torch  # here: the command starts in half the time without it

    goal = torch.tensor(target)
    start = torch.tensor(np.concatenate([w, gamma]))

    def loss(theta: torch.Tensor) -> torch.Tensor:
        first, second = theta.chunk(2)
        return 0.5 * (first * second - goal).square().sum()

    hessian: Array = torch.autograd.functional.hessian(loss, start).numpy()  # type: ignore[no-untyped-call, union-attr]
    return hessian


def dense_sharpness(hessian: Array) -> Sharpness:
    """Sharpness figures of a dense symmetric matrix."""
    eigenvalues = np.linalg.eigvalsh(hessian)
    return Sharpness(eigenvalues[-1], np.trace(hessian), np.sqrt((hessian**2).sum()))
