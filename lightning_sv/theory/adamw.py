"""Effective step of a scale-invariant matrix under AdamW with decay, as a function of its initial std.

Setting: L(cW) = L(W) for every c > 0, as for a branch under DNP, y = γ_out ⊙ Norm(W(γ_in ⊙ x̂)). Then ⟨W, ∇L⟩ = 0 and
∇L(cW) = ∇L(W) / c; the function changes by the relative step ‖ΔW‖ / ‖W‖. AdamW's update u = m̂ / √v̂ does not depend on
the gradient's size:

    W_(t+1) = (1 − η_t λ) W_t − η_t u_t

Exactly (ε = 0): the start c W_0, rates c η_t and decay λ/c give c W_t. An initial std thus acts as a learning rate.

If noise dominates the mean gradient, each g enters Σ u with total weight 1 for any β1, and is orthogonal to W:
r² = ‖W‖² / n grows by η² per step, while a single update has rms √((1 − β1) / (1 + β1)), about 0.23 for β1 = 0.9. Known
for constant rates as rotational equilibrium (Kosson et al., arXiv:2305.17212); here with the start and any schedule.
"""

import numpy as np

from lightning_sv.theory.dual import Array


def radii(start: float, rates: Array, decay: float, diffusion: float = 1.0) -> Array:
    """Return r of r²_(t+1) = (1 − η_t λ)² r²_t + D η_t²: the rms of W before every step and after the last.

    Args:
        start: initial std r_0
        rates: η_t, shape (T,)
        decay: λ
        diffusion: D, 1 for white noise

    Returns:
        r, shape (T + 1,).
    """
    squares = [start**2]
    for rate in rates:
        squares.append((1 - rate * decay) ** 2 * squares[-1] + diffusion * rate**2)
    return np.sqrt(squares)


def update_rms(beta1: float) -> float:
    """Return √((1 − β1) / (1 + β1)), the rms of m̂ / √v̂ under white noise."""
    return float(np.sqrt((1 - beta1) / (1 + beta1)))


def relative_steps(start: float, rates: Array, decay: float, beta1: float = 0.9) -> Array:
    """Return ‖ΔW_t‖ / ‖W_t‖ = η_t √((1 − β1) / (1 + β1)) / r_t, shape (T,); arguments as in `radii`."""
    return np.asarray(np.asarray(rates) * update_rms(beta1) / radii(start, rates, decay)[:-1])


def equilibrium(rate: float, decay: float) -> float:
    """Return r_∞ = √(η / (λ(2 − ηλ))), at which growth and decay balance at a constant rate."""
    return float(np.sqrt(rate / (decay * (2 - rate * decay))))


def memory(start: float, rate: float, decay: float) -> float:
    """Return the steps after which half of r² is due to the optimizer.

    r_0²/η² for a small start, log(1 + r_0²/r_∞²) / (2ηλ) in general.

    Args:
        start: r_0
        rate: η, constant
        decay: λ; 0 for none
    """
    if decay == 0:
        return start**2 / rate**2
    share = start**2 / equilibrium(rate, decay) ** 2
    return float(np.log1p(share) / (-2 * np.log1p(-rate * decay)))


def simulate_radius(start: float, rates: Array, decay: float, *, n: int = 4000, seed: int = 0) -> tuple[Array, Array]:
    """Simulate AdamW (β = 0.9, 0.95, no ε) on ⟨ξ_t, W/‖W‖⟩ with fresh ξ_t ~ N(0, I_n): scale-invariant noise.

    Returns:
        r before every step and after the last, (T + 1,), and ‖ΔW‖ / ‖W‖ of every step, (T,).
    """
    beta1, beta2 = 0.9, 0.95
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(n)
    w *= start * np.sqrt(n) / np.linalg.norm(w)
    m, v = np.zeros(n), np.zeros(n)
    radius, steps = [start], []
    for t, rate in enumerate(rates, 1):
        length = np.linalg.norm(w)
        noise = rng.standard_normal(n)
        gradient = (noise - w * (w @ noise) / length**2) / length
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        update = rate * (m / (1 - beta1**t)) / np.sqrt(v / (1 - beta2**t))
        steps.append(float(np.linalg.norm(update) / length))
        w = (1 - rate * decay) * w - update
        radius.append(float(np.linalg.norm(w) / np.sqrt(n)))
    return np.array(radius), np.array(steps)
