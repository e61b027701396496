"""SGD in continuous time on ½‖γ ⊙ w − a*‖² with weight decay, by Euler–Maruyama.

    dw = −(γ ⊙ g + λ w) dt + √q dB_w,   dγ = −(w ⊙ g + μ γ) dt + √q dB_γ,   g = γ ⊙ w − a*

Paper, Appendix "Proof of Theorem (Benefits of wd)"; q = η σ², learning rate times noise variance. Times are in
units of the flow. Shapes: p paths, d coordinates, T recorded times, k values of μ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_sv.theory.dual import Array
from lightning_sv.theory.hessian import sharpness


@dataclass(frozen=True)
class NoisyTraining:
    """Parameters of the integration; w starts at 0, γ at 1.

    Args:
        target: a*, shape (d,)
        mus: weight decays of γ, integrated with the same noise
        lam: λ, weight decay of w
        q: strength of the noise
        dt: step size; the drift is stable if dt·γ² is far below 2
        end: final time of the paths
        paths: number of independent paths
        seed: seed of the noise
    """

    target: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    mus: tuple[float, ...] = (0.0, 0.02)
    lam: float = 0.1
    q: float = 0.02
    dt: float = 0.005
    end: float = 400.0
    paths: int = 400
    seed: int = 0

    def bound(self, decay: float, start: float, times: Array) -> Array:
        """Return Grönwall's bound on E‖γ‖² (decay μ) or E‖w‖² (decay λ), with the value `start` at t = 0.

        e^(−2·decay·t)·start + (d q + ½‖a*‖²) / (2·decay) · (1 − e^(−2·decay·t))
        """
        goal = np.asarray(self.target)
        level = (len(goal) * self.q + 0.5 * float(goal @ goal)) / (2 * decay)
        faded = np.exp(-2 * decay * times)
        return faded * start + level * (1 - faded)


@dataclass(frozen=True)
class Paths:
    """Recorded quantities of every path, each of shape (T, k, p)."""

    times: Array  #: (T,)
    gamma: Array  #: ‖γ‖²
    w: Array  #: ‖w‖²
    lambda_max: Array
    trace: Array
    frobenius: Array


def simulate(setting: NoisyTraining, records: int = 80) -> Paths:
    """Integrate all paths for all μ and record `records` + 1 equally spaced times."""
    goal = np.asarray(setting.target, dtype=float)
    shape = (len(setting.mus), setting.paths, len(goal))
    rng = np.random.default_rng(setting.seed)
    mu = np.asarray(setting.mus)[:, None, None]
    w, gamma = np.zeros(shape), np.ones(shape)
    per_record = round(setting.end / setting.dt / records)
    noise = np.sqrt(setting.q * setting.dt)
    keep_w, keep_gamma = 1 - setting.lam * setting.dt, 1 - mu * setting.dt
    states = [(w, gamma)]
    for _ in range(records):
        for _ in range(per_record):
            pull = setting.dt * (gamma * w - goal)
            kick = noise * rng.standard_normal((2, *shape[1:]))  # shared by all μ, so that differences are not noise
            w, gamma = keep_w * w - pull * gamma + kick[0], keep_gamma * gamma - pull * w + kick[1]
        states.append((w, gamma))
    times = np.arange(records + 1) * per_record * setting.dt
    w, gamma = (np.stack(each) for each in zip(*states, strict=True))
    return Paths(times, (gamma**2).sum(-1), (w**2).sum(-1), *sharpness(w, gamma, goal))
