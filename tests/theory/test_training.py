"""SGD in continuous time and a step of it, against Itô's formula, autograd and sampling; the
radius of AdamW at its limits."""

import numpy as np
import pytest
import torch

from lightning_sv.theory.claims.descent import noise_term, random_point
from lightning_sv.theory.claims.initial_std import equilibrium, memory, radii
from lightning_sv.theory.claims.weight_decay import NoisyTraining, growth, simulate

SHORT = NoisyTraining(dt=0.002, end=10.0, paths=500, mus=(0.0, 0.3))


def test_simulate_scale_difference_follows_ito() -> None:
    """E[s(T) − s(0)] = 2 ∫ E[λ‖w‖² − μ‖γ‖²] dt, s = ‖γ‖² − ‖w‖² (Appendix C.2), for both μ."""
    paths = simulate(SHORT, records=200)
    s = paths.gamma - paths.w
    for k, mu in enumerate(SHORT.mus):
        drift = 2 * np.trapezoid(
            SHORT.lam * paths.w[:, k] - mu * paths.gamma[:, k], paths.times, axis=0
        )
        difference = s[-1, k] - s[0, k] - drift
        error = difference.std(ddof=1) / np.sqrt(SHORT.paths)
        assert abs(difference.mean()) < 3 * error + 0.02
        assert abs(drift.mean()) > 10 * error


def test_simulate_noise_alone_has_its_variance() -> None:
    """E‖w(T)‖² = d q T, without decay and with a teacher of 0."""
    noise = NoisyTraining(
        target=(0.0,), lam=0.0, mus=(0.0,), q=0.02, dt=0.001, end=0.05, paths=4000
    )
    assert simulate(noise, records=1).w[-1, 0].mean() == pytest.approx(0.02 * 0.05, rel=0.1)


def test_bound_has_its_limits() -> None:
    """The bound starts at the start and settles at (dq + ½‖a*‖²) / 2μ."""
    assert NoisyTraining().bound(0.02, 4.0, np.array([0.0, 1e6])) == pytest.approx(
        [4, (4 * 0.02 + 2) / 0.04]
    )


def test_growth_equals_resampling() -> None:
    rng = np.random.default_rng(0)
    early = rng.gamma(4, 1, 4000)
    noise = rng.normal(0, 1, 4000)
    ratio, error = growth(2 * early + noise, early)
    picks = rng.integers(0, 4000, (400, 4000))
    resampled = (2 * early + noise)[picks].mean(1) / early[picks].mean(1)
    assert ratio == pytest.approx(2, abs=4 * error) and error == pytest.approx(
        resampled.std(), rel=0.15
    )


def test_point_gradient_equals_autograd() -> None:
    point = random_point(np.random.default_rng(0), d=3)
    theta = torch.tensor(point.theta, requires_grad=True)
    first, second = theta.chunk(2)
    loss = 0.5 * (first * second - torch.tensor(point.target)).square().sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    np.testing.assert_allclose(point.gradient, gradient.numpy(), atol=1e-12)
    assert float(point.loss()) == pytest.approx(loss.item(), rel=1e-12)


def test_expected_loss_equals_the_mean_of_samples() -> None:
    """The samples are normal; to second order only the covariance matters."""
    rng = np.random.default_rng(1)
    point = random_point(rng)
    factor = 0.3 * rng.standard_normal((8, 5))
    eta = 0.05
    covariance = factor @ factor.T
    noise = rng.standard_normal((200_000, 5)) @ factor.T
    sampled = point.loss(point.theta - eta * (point.gradient + noise))
    error = sampled.std(ddof=1) / np.sqrt(sampled.size)
    exact = point.expected_loss(eta, covariance)
    assert exact == pytest.approx(sampled.mean(), abs=4 * error + 1e-4 * eta**2)
    second_order = point.after_descent(eta) + eta**2 / 2 * noise_term(point.hessian, covariance)
    assert exact == pytest.approx(second_order, abs=20 * eta**3)
    assert abs(exact - second_order) < abs(exact - point.after_descent(eta))


def test_radii_have_their_limits() -> None:
    """The limits are the random walk, the equilibrium, and the memory of half of r²."""
    flat = np.full(4000, 0.01)
    assert radii(0.0, flat[:100], 0.0)[-1] == pytest.approx(0.1)
    assert radii(0.5, flat, 0.5)[-1] == pytest.approx(equilibrium(0.01, 0.5), rel=1e-9)
    at = round(memory(0.3, 0.01, 0.1))
    own = radii(0.0, flat[:at], 0.1)[-1]
    assert radii(0.3, flat[:at], 0.1)[-1] ** 2 == pytest.approx(2 * own**2, rel=0.01)
