"""Parameterizations against their formulas and the paper's implicit preconditioner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sv.scale import DirectScale, ExponentialScale, OriginalSpaceScale, ScaleVector
from lightning_sv.scale.strategy import PARAMETERIZATIONS
from lightning_sv.scale.vector import HeadShared

EVERY = pytest.mark.parametrize("kind", list(PARAMETERIZATIONS.values()))


@EVERY
@pytest.mark.parametrize("batch_dims", [(), (3,)])
@pytest.mark.parametrize("d", [1, 5, 768, 853])
def test_scale_vector_new_or_reset_is_exactly_one(kind: type[ScaleVector], batch_dims: tuple[int, ...], d: int) -> None:
    vector = kind(d, "input", batch_dims)
    assert torch.equal(vector(), torch.ones(*batch_dims, d))
    with torch.no_grad():
        for parameter in vector.parameters():
            parameter.add_(0.5)
    vector.reset_parameters()
    assert torch.equal(vector(), torch.ones(*batch_dims, d))


@EVERY
@given(values=st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8))
def test_set_gamma_is_the_inverse_of_forward(kind: type[ScaleVector], values: list[float]) -> None:
    gamma = torch.tensor(values, dtype=torch.float64)
    vector = kind(len(values), "output").double()
    vector.set_gamma(gamma)
    torch.testing.assert_close(vector(), gamma, rtol=1e-12, atol=0)


def test_forward_of_or_and_er_equals_their_formulas() -> None:
    alpha, beta = torch.randn(7, dtype=torch.float64), torch.tensor([1.7], dtype=torch.float64)
    r, e = OriginalSpaceScale(7, "input").double(), ExponentialScale(7, "input").double()
    for vector in (r, e):
        vector.load_state_dict({"alpha": alpha, "beta": beta})
    torch.testing.assert_close(r(), beta * 7**0.5 * alpha / alpha.norm())
    torch.testing.assert_close(e(), beta.exp() * (alpha - alpha.mean()).exp())


@given(
    alpha=st.lists(st.floats(-5, 5), min_size=2, max_size=9).filter(lambda a: sum(x * x for x in a) > 0.01),
    beta=st.floats(-3, 3).filter(lambda b: abs(b) > 0.01),
)
def test_or_jacobian_gives_preconditioner_of_paper(alpha: list[float], beta: float) -> None:
    """J J^T = d g g^T + rho (I - g g^T), rho = beta^2 d / ||alpha||^2 (paper, Section 3.3)."""
    d = len(alpha)
    a, b = torch.tensor(alpha, dtype=torch.float64), torch.tensor([beta], dtype=torch.float64)
    vector = OriginalSpaceScale(d, "input").double()

    def gamma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(vector, {"alpha": a, "beta": b}, ())

    jacobian = torch.cat(torch.autograd.functional.jacobian(gamma, (a, b)), dim=1)  # (d, d + 1)
    g = gamma(a, b) / gamma(a, b).norm()
    rho = beta**2 * d / a.square().sum()
    expected = d * torch.outer(g, g) + rho * (torch.eye(d, dtype=torch.float64) - torch.outer(g, g))
    torch.testing.assert_close(jacobian @ jacobian.T, expected, rtol=1e-9, atol=1e-9)


def test_set_gamma_not_representable_refused() -> None:
    with pytest.raises(ValueError, match="'or' cannot represent a zero"):
        OriginalSpaceScale(3, "input").set_gamma(torch.zeros(3))
    with pytest.raises(ValueError, match="'er' cannot represent"):
        ExponentialScale(3, "input").set_gamma(torch.tensor([1.0, -1.0, 2.0]))
    DirectScale(3, "input").set_gamma(torch.zeros(3))
    vector = HeadShared(DirectScale(3, "output"), 2)
    vector.set_gamma(torch.tensor([1.0, 2, 3, 1, 2, 3]))
    assert vector().tolist() == [1, 2, 3, 1, 2, 3] and vector.vector.gamma.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="share_heads"):
        vector.set_gamma(torch.arange(6.0))
