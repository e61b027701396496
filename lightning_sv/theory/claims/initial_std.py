"""Initial std under AdamW with decay: the effective step.

It explains why the std matters for llama but not for dnp. The paper does not treat this.

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

from functools import cache, partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, Panel, claim
from lightning_sv.theory.series import Array

if TYPE_CHECKING:  # imports torch, which other claims do not need
    from lightning_sv.theory.toy_training import ShortRun

STDS = (0.005, 0.08, 0.32, 1.28)
ARMS = ("llama", "dnp")
STEPS = 200
PEAK = 0.006
DECAY = 0.1
#: steps in which the rate rises, as `toy_training.rates` sets it
WARMUP = STEPS // 10
_BETA1 = 0.9  # of AdamW, as in all runs here
_COLOURS = {"llama": "vermillion", "dnp": "blue"}
_RUNS = (
    f"our Llama and its dnp, d = 32, {STEPS} steps of AdamW, η = {PEAK}, λ = {DECAY}, "
    f"std {STDS[0]} to {STDS[-1]}"
)
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
    for arm in ("dnp", "hg+dnp+or", "llama"):
        apart[arm] = float(
            np.abs(losses_of_rescaled(arm, 4.0) - losses_of_rescaled(arm, 1.0)).max()
        )
    worst = max(apart["dnp"], apart["hg+dnp+or"])
    note = (
        "c = 4, 8 steps of our models in float64; largest difference of the losses: "
        + ", ".join(f"{arm} {value:.1e}" for arm, value in apart.items())
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


@cache
def _runs() -> "dict[tuple[str, float], ShortRun]":
    from lightning_sv.theory.toy_training import train

    runs = {}
    for arm in ARMS:
        for std in STDS:
            runs[arm, std] = train(arm, std, steps=STEPS, peak=PEAK, decay=DECAY)
    return runs


@_init_std("r(t) in training", _RUNS)
def _radius_in_training() -> Finding:
    """dnp's matrices follow this law within a factor 1.5."""
    from lightning_sv.theory.toy_training import rates

    schedule = rates(STEPS, PEAK)
    stated = {std: radii(std, schedule, DECAY) for std in STDS}
    measured = {key: np.sqrt((run.radii**2).mean(1)) for key, run in _runs().items()}
    ratios = {}
    for (arm, std), values in measured.items():
        after_warmup = (values / stated[std])[WARMUP:]
        ratios[arm, std] = float(after_warmup.max()), float(after_warmup.min())
    of_dnp = [ratio for (arm, _), ratio in ratios.items() if arm == "dnp"]
    factor = max(max(high, 1 / low) for high, low in of_dnp)
    note = "measured / stated, largest and least after the warm-up: " + ", ".join(
        f"{arm} {std:g}: {high:.2f}, {low:.2f}" for (arm, std), (high, low) in ratios.items()
    )
    note += "; llama's gradient has a radial part, the law none"
    panels = (_radius_panel(measured, stated),)
    return Finding("within 1.5", factor, None, agrees=factor < 1.5, note=note, panels=panels)


def _radius_panel(measured: dict[tuple[str, float], Array], stated: dict[float, Array]) -> Panel:
    """Plot the rms of the matrices, (T + 1,): a line per arm and std, marks for the closed form."""
    steps = np.arange(STEPS + 1)
    lines = []
    for (arm, std), values in measured.items():
        label = arm if std == STDS[0] else ""  # one entry of the legend per arm
        lines.append(Line(label, steps, values, colour=_COLOURS[arm]))
    for std, values in stated.items():
        label = "closed form" if std == STDS[0] else ""
        lines.append(Line(label, steps[::10], values[::10], marks=True, colour="grey"))
    return Panel(
        "In training: dnp follows the law, llama almost",
        "step of a short training",
        "rms of q, k, v, gate, up",
        lines,
        scale="y",
    )


def _by_std(title: str, y: str, values: dict[str, Array], scale: Literal["x", "xy"]) -> Panel:
    lines = [Line(arm, STDS, values[arm], colour=_COLOURS[arm]) for arm in ARMS]
    return Panel(title, "initial std of q, k, v, gate, up", y, lines, scale=scale)


@_init_std("the step alone", _RUNS, expected="fails")
def _step_explains() -> Finding:
    """llama's relative step depends on the std more than dnp's."""
    steps = {
        arm: np.array([_runs()[arm, std].relative_steps[WARMUP:].mean() for std in STDS])
        for arm in ARMS
    }
    spans = {arm: float(values.max() / values.min()) for arm, values in steps.items()}
    panel = _by_std(
        "The relative step depends on the std in both",
        "mean ‖ΔW‖ / ‖W‖ after the warm-up",
        steps,
        "xy",
    )
    note = f"largest over least mean step: llama {spans['llama']:.0f}, dnp {spans['dnp']:.0f}"
    ratio = spans["llama"] / spans["dnp"]
    return Finding("> 1.5", ratio, None, agrees=ratio > 1.5, note=note, panels=(panel,))


@_init_std("loss", _RUNS)
def _loss() -> Finding:
    """the loss depends on the std less than half as much under dnp."""
    losses = {arm: np.array([_runs()[arm, std].loss for std in STDS]) for arm in ARMS}
    spreads = {arm: float(np.ptp(values)) for arm, values in losses.items()}
    panel = _by_std(
        "The loss depends on the std under llama",
        "loss on held-out text, nats per byte",
        losses,
        "x",
    )
    note = "; ".join(
        f"{arm} {', '.join(f'{x:.3f}' for x in values)}" for arm, values in losses.items()
    )
    share = spreads["dnp"] / spreads["llama"]
    return Finding(
        "< 0.5", share, None, share < 0.5, f"spread of dnp over llama's; losses: {note}", (panel,)
    )
