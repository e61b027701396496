"""The SDE against Itô's formula and a halved step; the Hessian's closed forms against autograd."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lightning_sv.theory.hessian import dense_hessian, dense_sharpness, sharpness
from lightning_sv.theory.sde import NoisyTraining, simulate

SHORT = NoisyTraining(dt=0.002, end=10.0, paths=500, mus=(0.0, 0.3))


def test_simulate_scale_difference_follows_ito() -> None:
    """E[s(T) − s(0)] = 2 ∫ E[λ‖w‖² − μ‖γ‖²] dt, s = ‖γ‖² − ‖w‖² (Appendix C.2), for both μ."""
    paths = simulate(SHORT, records=200)
    s = paths.gamma - paths.w
    for k, mu in enumerate(SHORT.mus):
        drift = 2 * np.trapezoid(SHORT.lam * paths.w[:, k] - mu * paths.gamma[:, k], paths.times, axis=0)
        difference = s[-1, k] - s[0, k] - drift
        error = difference.std(ddof=1) / np.sqrt(SHORT.paths)
        assert abs(difference.mean()) < 3 * error + 0.02
        assert abs(drift.mean()) > 10 * error


def test_simulate_moments_do_not_depend_on_the_time_step() -> None:
    coarse, fine = (simulate(NoisyTraining(dt=dt, end=10.0, paths=800), records=2) for dt in (0.01, 0.005))
    for a, b in ((coarse.gamma, fine.gamma), (coarse.w, fine.w), (coarse.trace, fine.trace)):
        error = np.sqrt((a[-1].var(-1) + b[-1].var(-1)) / 800)
        assert (np.abs(a[-1].mean(-1) - b[-1].mean(-1)) < 3.5 * error).all()
    again = simulate(NoisyTraining(dt=0.01, end=10.0, paths=800), records=2)
    assert np.array_equal(again.gamma, coarse.gamma)


def test_bound_has_its_limits() -> None:
    """The bound starts at the start and settles at (dq + ½‖a*‖²) / 2μ."""
    setting = NoisyTraining()
    times = np.array([0.0, 1e6])
    assert setting.bound(0.02, 4.0, times) == pytest.approx([4, (4 * 0.02 + 2) / 0.04])


vectors = arrays(float, (3, 4), elements=st.floats(-3, 3))


@given(vectors)
@settings(max_examples=30)
def test_sharpness_closed_forms_equal_the_dense_hessian(state: np.ndarray) -> None:
    w, gamma, target = state
    hessian = dense_hessian(w, gamma, target)
    ours, oracle = sharpness(w, gamma, target), dense_sharpness(hessian)
    for name in ("lambda_max", "trace", "frobenius"):
        assert getattr(ours, name) == pytest.approx(float(getattr(oracle, name)), abs=1e-9)
    assert sharpness(state[None, 0], state[None, 1], state[None, 2]).trace.shape == (1,)
