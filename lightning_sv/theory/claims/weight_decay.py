"""Weight decay on γ: without it γ and the Hessian's sharpness grow forever, with it they converge.

SGD in continuous time on ½‖γ ⊙ w − a*‖² with weight decay, by Euler–Maruyama:

    dw = −(γ ⊙ g + λ w) dt + √q dB_w,   dγ = −(w ⊙ g + μ γ) dt + √q dB_γ,   g = γ ⊙ w − a*

Paper, Appendix "Proof of Theorem (Benefits of wd)"; q = η σ², learning rate times noise variance.
Times are in units of the flow. Shapes: p paths, d coordinates, T recorded times, k values of μ.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from lightning_sv.theory.claims.base import TIME, Finding, Line, Panel, claim
from lightning_sv.theory.claims.descent import Point
from lightning_sv.theory.series import Array


class NoisyTraining(NamedTuple):
    """Parameters of the integration; w starts at 0, γ at 1."""

    target: Sequence[float] = (1.0, 1.0, 1.0, 1.0)  #: a*, shape (d,)
    mus: tuple[float, ...] = (0.0, 0.02)  #: weight decays of γ, integrated with the same noise
    lam: float = 0.1  #: λ, weight decay of w
    q: float = 0.02  #: strength of the noise
    dt: float = 0.005  #: step size; the drift is stable if dt·γ² is far below 2
    end: float = 400.0  #: final time of the paths
    paths: int = 400

    def bound(self, decay: float, start: float, times: Array) -> Array:
        """Return Grönwall's bound on E‖γ‖² (decay μ) or E‖w‖² (decay λ) from `start` at t = 0.

        e^(−2·decay·t)·start + (d q + ½‖a*‖²) / (2·decay) · (1 − e^(−2·decay·t))
        """
        goal = np.asarray(self.target)
        level = (len(goal) * self.q + 0.5 * float(goal @ goal)) / (2 * decay)
        faded = np.exp(-2 * decay * times)
        return faded * start + level * (1 - faded)


class Paths(NamedTuple):
    """Recorded quantities of every path, each of shape (T, k, p)."""

    times: Array  #: (T,)
    gamma: Array  #: ‖γ‖²
    w: Array  #: ‖w‖²
    sharpness: dict[str, Array]


def sharpness(w: Array, gamma: Array, target: Array) -> dict[str, Array]:
    """Return λ_max, trace and Frobenius norm of ∇²L.

    Its blocks are H_i = [[γ_i², m_i], [m_i, w_i²]].

    m_i = 2 γ_i w_i − a*_i. Shapes: w and γ (..., d), a* (d,), each result (...).
    """
    mixed = 2 * gamma * w - target
    largest = 0.5 * (gamma**2 + w**2 + np.sqrt((gamma**2 - w**2) ** 2 + 4 * mixed**2))
    return {
        "λ_max": largest.max(-1),
        "trace": (gamma**2 + w**2).sum(-1),
        "Frobenius norm": np.sqrt((gamma**4 + w**4 + 2 * mixed**2).sum(-1)),
    }


def dense_hessian(w: Array, gamma: Array, target: Array) -> Array:
    """Return ∇²L of one state by autograd, (2d, 2d), ordered (w, γ) as the paper's blocks."""
    import torch  # imported here, because it doubles the start time

    def loss(theta: torch.Tensor) -> torch.Tensor:
        first, second = theta.chunk(2)
        return 0.5 * (first * second - torch.tensor(target)).square().sum()

    return np.asarray(torch.func.hessian(loss)(torch.tensor(np.concatenate([w, gamma]))))


def simulate(setting: NoisyTraining, records: int = 80) -> Paths:
    """Integrate all paths for all μ and record `records` + 1 equally spaced times."""
    goal = np.asarray(setting.target, dtype=float)
    shape = (len(setting.mus), setting.paths, len(goal))
    rng = np.random.default_rng(0)
    mu = np.asarray(setting.mus)[:, None, None]
    w = np.zeros(shape)
    gamma = np.ones(shape)
    per_record = round(setting.end / setting.dt / records)
    noise = np.sqrt(setting.q * setting.dt)
    keep_w = 1 - setting.lam * setting.dt
    keep_gamma = 1 - mu * setting.dt
    states = [(w, gamma)]
    for _ in range(records):
        for _ in range(per_record):
            pull = setting.dt * (gamma * w - goal)
            # Shared by all μ, so that differences are not noise.
            kick_w, kick_gamma = noise * rng.standard_normal((2, *shape[1:]))
            next_w = keep_w * w - pull * gamma + kick_w
            gamma = keep_gamma * gamma - pull * w + kick_gamma
            w = next_w
        states.append((w, gamma))
    times = np.arange(records + 1) * per_record * setting.dt
    w, gamma = (np.stack(each) for each in zip(*states, strict=True))
    return Paths(times, (gamma**2).sum(-1), (w**2).sum(-1), sharpness(w, gamma, goal))


_SOURCE = "Theorems 2.3 and C.1"
_SETTING = NoisyTraining()
_CONDITIONS = (
    f"λ = {_SETTING.lam}, q = {_SETTING.q}, a* = 1 in d = {len(_SETTING.target)}, "
    f"{_SETTING.paths} paths, "
    f"dt = {_SETTING.dt}, T = {_SETTING.end / 4:g}"
)
#: colours of the metrics without and with decay
_COLOURS = (("vermillion", "orange", "sky"), ("blue", "green", "black"))
# places of μ = 0 and μ > 0 in `NoisyTraining.mus`, and on the second axis of `Paths`
_NO_DECAY = 0
_DECAY = 1
# normal quantiles of 99% intervals
_Z_ONE_SIDED = float(ndtri(0.99))
_Z_TWO_SIDED = float(ndtri(0.995))


def growth(late: Array, early: Array) -> tuple[float, float]:
    """Return the ratio of the means of two paired samples, and its standard error.

    By the delta method.
    """
    ratio = float(late.mean() / early.mean())
    error = float((late - ratio * early).std(ddof=1) / np.sqrt(late.size) / early.mean())
    return ratio, error


@cache
def _paths() -> Paths:
    return simulate(_SETTING)


def _standard_error(values: Array) -> Array:
    """Return the standard error of the mean over paths, (..., p) -> (...)."""
    return np.asarray(values.std(-1, ddof=1) / np.sqrt(values.shape[-1]))


def _mean_line(label: str, times: Array, values: Array, colour: str) -> Line:
    """Return the mean over paths with a 99% band; values (T, p)."""
    spread = _Z_TWO_SIDED * _standard_error(values)
    return Line(label, times, values.mean(-1), spread=spread, colour=colour)


def _gamma_bound(times: Array) -> Array:
    """Return the bound on E‖γ‖² with decay, (T,); γ starts at 1."""
    return _SETTING.bound(_SETTING.mus[_DECAY], len(_SETTING.target), times)


def _w_bound(times: Array) -> Array:
    """Return the bound on E‖w‖², (T,); w starts at 0."""
    return _SETTING.bound(_SETTING.lam, 0.0, times)


@claim("weight-decay", _SOURCE, "μ = 0: γ", _CONDITIONS)
def _no_decay_grows() -> Finding:
    """E‖γ(4T)‖² / E‖γ(T)‖² > 1.5: unbounded."""
    paths = _paths()
    gamma = paths.gamma[:, _NO_DECAY]  # (T, p)
    quarter = len(paths.times) // 4
    ratio, error = growth(gamma[-1], gamma[quarter])
    panel = Panel(
        "Without decay of γ (μ = 0) its norm grows",
        TIME,
        r"$E\|\gamma\|^2$, band: 99% interval",
        [
            _mean_line("μ = 0", paths.times, gamma, "vermillion"),
            _mean_line(f"μ = {_SETTING.mus[_DECAY]}", paths.times, paths.gamma[:, _DECAY], "blue"),
            Line(
                "the proof's bound, μ > 0", paths.times, _gamma_bound(paths.times), colour="green"
            ),
        ],
    )
    low = ratio - _Z_ONE_SIDED * error
    records = np.searchsorted(paths.times, (0, 30, 100, 400))
    means = ", ".join(f"{mean:.1f}" for mean in gamma[records].mean(-1))
    note = f"99% lower bound {low:.2f}; E‖γ‖² at t = 0, 30, 100, 400: {means}"
    return Finding("> 1.5", ratio, error, low > 1.5, note, (panel,))


@claim("weight-decay", _SOURCE, "μ = 0: sharpness", _CONDITIONS)
def _no_decay_sharpens() -> Finding:
    """λ_max, Tr, ‖·‖_F of ∇²L at 4T / those at T > 1.5."""
    paths = _paths()
    quarter = len(paths.times) // 4
    growths = {}
    for metric, values in paths.sharpness.items():  # (T, k, p)
        growths[metric] = growth(values[-1, _NO_DECAY], values[quarter, _NO_DECAY])
    lows = {metric: ratio - _Z_ONE_SIDED * error for metric, (ratio, error) in growths.items()}
    weakest = min(lows, key=lambda metric: lows[metric])
    ratio, error = growths[weakest]
    note = "99% lower bounds: " + ", ".join(f"{metric} {low:.2f}" for metric, low in lows.items())
    panel = _sharpness_panel(paths)
    return Finding("> 1.5", ratio, error, agrees=lows[weakest] > 1.5, note=note, panels=(panel,))


def _sharpness_panel(paths: Paths) -> Panel:
    """Plot each sharpness metric relative to its start, per decay μ."""
    lines = []
    for k, (mu, colours) in enumerate(zip(_SETTING.mus, _COLOURS, strict=True)):
        for (metric, values), colour in zip(paths.sharpness.items(), colours, strict=True):
            relative = values[:, k].mean(-1) / values[0, k].mean()
            lines.append(Line(f"{metric}, μ = {mu:g}", paths.times, relative, colour=colour))
    return Panel(
        "The Hessian sharpens with it",
        TIME,
        "E[sharpness] / its value at t = 0",
        lines,
        scale="y",
        limits=(0.8, 150),
    )


@claim("weight-decay", _SOURCE, "μ > 0: slope", _CONDITIONS)
def _decay_settles() -> Finding:
    """E‖γ‖² and the sharpness of ∇²L stay bounded: slope 0."""
    paths = _paths()
    window = _SETTING.end / 2
    late = paths.times >= window
    times = paths.times[late]
    gamma = _trend(times, paths.gamma[late, _DECAY])
    metrics = {}
    for metric, values in paths.sharpness.items():
        metrics[metric] = _trend(times, values[late, _DECAY])
    others = ", ".join(
        f"{metric} {trend.slope:.1e} ± {trend.error:.1e}" for metric, trend in metrics.items()
    )
    note = (
        f"slope of E‖γ‖² from t = {window:g} and its standard error; "
        "holds when 0 lies in the 99% interval of every "
        f"slope; level {gamma.level:.2f}; {others}"
    )
    settled = all(trend.is_settled(window) for trend in (gamma, *metrics.values()))
    return Finding(0.0, gamma.slope, gamma.error, settled, note)


class _Trend(NamedTuple):
    """Linear trend of a quantity over time, as the mean over paths."""

    slope: float  #: per unit of t
    error: float  #: standard error of the slope
    level: float  #: mean of the quantity

    def is_settled(self, window: float) -> bool:
        """Return True if the 99% interval of the slope covers 0, and is narrow.

        A wide interval would cover 0 too. A narrow one allows a drift over the window of at most
        10% of the level.
        """
        half = _Z_TWO_SIDED * self.error
        covers_zero = abs(self.slope) < half
        is_narrow = (abs(self.slope) + half) * window < 0.1 * self.level
        return covers_zero and is_narrow


def _trend(times: Array, values: Array) -> _Trend:
    """Fit a line to each path; times (T,), values (T, p)."""
    slopes = np.polyfit(times, values, 1)[0]  # (p,)
    return _Trend(float(slopes.mean()), float(_standard_error(slopes)), float(values.mean()))


@claim("weight-decay", "Appendix C.2, eq. (Grönwall)", "bounds", _CONDITIONS)
def _below_bounds() -> Finding:
    """E‖γ‖² and E‖w‖² below the proof's bounds."""
    paths = _paths()
    gamma_bound = _gamma_bound(paths.times)
    w_bound = _w_bound(paths.times)
    shares = []
    for values, bound in (
        (paths.gamma[:, _DECAY], gamma_bound),
        (paths.w[:, _NO_DECAY], w_bound),
        (paths.w[:, _DECAY], w_bound),
    ):
        upper = values.mean(-1) + _Z_ONE_SIDED * _standard_error(values)
        shares.append(float((upper[1:] / bound[1:]).max()))  # at t = 0 both are the start
    names = "E‖γ‖² (μ > 0) {:.2f}, E‖w‖² (μ = 0) {:.2f}, E‖w‖² (μ > 0) {:.2f}"
    note = "largest share of the bound reached: " + names.format(*shares)
    return Finding("< 1", max(shares), None, max(shares) < 1, note)


@claim("weight-decay", "Appendix C.2", "Hessian", "any state")
def _closed_forms() -> Finding:
    """∇²L = diag(H_1, ..., H_d) and its closed forms."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(60):
        w, gamma, target = rng.standard_normal((3, rng.integers(1, 7)))
        hessian = dense_hessian(w, gamma, target)
        blocks = Point(np.concatenate([w, gamma]), target).hessian
        oracle = np.linalg.eigvalsh(hessian)[-1], np.trace(hessian), np.linalg.norm(hessian)
        apart = [
            abs(a - b) for a, b in zip(sharpness(w, gamma, target).values(), oracle, strict=True)
        ]
        worst = float(max(worst, np.abs(hessian - blocks).max(), *apart))
    return Finding(
        0.0,
        worst,
        worst,
        worst < 1e-10,
        "blocks, λ_max, trace and Frobenius norm of 60 random states",
    )
