"""Initial std under AdamW with decay: with dnp it acts as a learning rate.

The paper does not treat this.

Setting: L(cW) = L(W) for every c > 0, as for a branch under DNP, y = γ_out ⊙ Norm(W(γ_in ⊙ x̂)).
Then ⟨W, ∇L⟩ = 0 and ∇L(cW) = ∇L(W) / c; the function changes by the relative step ‖ΔW‖ / ‖W‖.
AdamW's update u = m̂ / √v̂ does not depend on the gradient's size:

    W_(t+1) = (1 − η_t λ) W_t − η_t u_t

Exactly (ε = 0): the start c W_0, rates c η_t and decay λ/c give c W_t. An initial std thus acts as
a learning rate.

If noise dominates the mean gradient, each g enters Σ u with total weight 1 for any β1, and is
orthogonal to W: r² = ‖W‖² / n grows by η² per step, while a single update has rms √((1 − β1) / (1 +
β1)), about 0.23 for β1 = 0.9. Known for constant rates as rotational equilibrium (Kosson et al.,
arXiv:2305.17212); here with the start and any schedule.
"""

from functools import partial

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, Panel, claim
from lightning_sv.theory.series import Array

STDS = (0.005, 0.08, 0.32, 1.28)
PEAK = 0.006
DECAY = 0.1
_BETA1 = 0.9  # of AdamW, as in all runs here
#: the first steps of AdamW are larger, because its second moment averages few values
SETTLED = 100
_init_std = partial(claim, "init-std", "ours; beyond the paper")


def radii(start: float, rates: Array, decay: float) -> Array:
    """Return r of r²_(t+1) = (1 − η_t λ)² r²_t + η_t², (T + 1,): the rms of W from r_0 on.

    The rates η_t have shape (T,); the decay is λ.
    """
    squares = [start**2]
    for rate in rates:
        squares.append((1 - rate * decay) ** 2 * squares[-1] + rate**2)
    return np.sqrt(squares)


def relative_steps(start: float, rates: Array, decay: float) -> Array:
    """Return ‖ΔW_t‖ / ‖W_t‖ = η_t √((1 − β1) / (1 + β1)) / r_t, (T,); arguments as in `radii`."""
    return np.asarray(
        rates * np.sqrt((1 - _BETA1) / (1 + _BETA1)) / radii(start, rates, decay)[:-1]
    )


def equilibrium(rate: float, decay: float) -> float:
    """Return r_∞ = √(η / (λ(2 − ηλ))), at which growth and decay balance at a constant rate."""
    return float(np.sqrt(rate / (decay * (2 - rate * decay))))


def memory(start: float, rate: float, decay: float) -> float:
    """Return log(1 + r_0²/r_∞²) / (−2 log(1 − ηλ)) steps.

    After them half of r² is due to the optimizer.
    """
    share = start**2 / equilibrium(rate, decay) ** 2
    return float(np.log1p(share) / (-2 * np.log1p(-rate * decay)))


@_init_std("equivalence", "dnp and unified hold, llama must not; ε negligible")
def _equivalence() -> Finding:
    """L(cW) = L(W): AdamW from c W_0 with rates c η and decay λ/c trains as from W_0."""
    from lightning_sv.theory.toy_training import losses_of_rescaled

    apart = {}
    for strategy in ("dnp", "hg+dnp+or", "llama"):
        differences = losses_of_rescaled(strategy, 4.0) - losses_of_rescaled(strategy, 1.0)
        apart[strategy] = float(np.abs(differences).max())
    worst = max(apart["dnp"], apart["hg+dnp+or"])
    note = (
        "c = 4, 8 steps of our models in float64; largest difference of the losses: "
        + ", ".join(f"{strategy} {value:.1e}" for strategy, value in apart.items())
    )
    return Finding(0.0, worst, worst, worst < 1e-9 and apart["llama"] > 0.1, note)


@_init_std(
    "r(t)", f"white noise orthogonal to W, η = {PEAK}, λ = {DECAY}, std {STDS[0]} to {STDS[-1]}"
)
def _simulated() -> Finding:
    """r²_(t+1) = (1 − ηλ)² r²_t + η², ‖ΔW‖/‖W‖ = η √((1 − β1)/(1 + β1)) / r."""
    from lightning_sv.theory.toy_training import simulate_radius

    n_steps = 3000
    rates = np.full(n_steps, PEAK)
    worst = 0.0
    lines = []
    for std in STDS:
        run = simulate_radius(std, rates, DECAY)
        stated_radii = radii(std, rates, DECAY)
        stated_steps = relative_steps(std, rates, DECAY)
        worst = max(
            worst,
            _largest_error(run.radii[:-1], stated_radii[:-1]),
            _largest_error(run.relative_steps, stated_steps),
        )
        shown = np.unique(np.geomspace(1, n_steps, 60).astype(int)) - 1
        few = shown[::3]
        lines.append(Line(f"std {std:g}", shown + 1, stated_radii[shown]))
        lines.append(Line("", few + 1, run.radii[few], marks=True, colour="grey"))
    panel = Panel(
        "AdamW forgets the std (marks: simulated)",
        f"step, η = {PEAK}, λ = {DECAY}",
        "rms of the matrix",
        lines,
        scale="xy",
        level=equilibrium(PEAK, DECAY),
    )
    note = (
        f"rms and relative step, means of 50 steps from step {SETTLED} to 3,000; all approach r = "
        f"{equilibrium(PEAK, DECAY):.3f}; half of r² is due to AdamW after "
        + ", ".join(f"{memory(std, PEAK, DECAY):.0f} steps (std {std:g})" for std in STDS)
    )
    return Finding(0.0, worst, worst, worst < 0.12, note, (panel,))


def _largest_error(simulated: Array, stated: Array) -> float:
    """Return the largest relative error of a mean of 50 steps, from step `SETTLED` on; (T,) each.

    Single relative steps scatter, so means are compared.
    """
    ratio = simulated[SETTLED:] / stated[SETTLED:]
    means = np.convolve(ratio, np.full(50, 1 / 50), "valid")
    return float(np.abs(means - 1).max())
