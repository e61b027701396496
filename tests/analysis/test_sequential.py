"""Alpha spending, against published boundaries and simulation."""

import numpy as np
import pytest
from scipy.special import ndtri

from lightning_sv.analysis.sequential import levels, spent


def test_boundaries_are_the_published_ones() -> None:
    """Two and four equal looks at a one-sided 2.5%: Lan and DeMets' boundaries of the O'Brien-Fleming type."""
    assert -ndtri(levels([1, 2], 0.025)) == pytest.approx([2.963, 1.969], abs=1e-3)
    assert -ndtri(levels([1, 2, 3, 4], 0.025)) == pytest.approx([4.333, 2.963, 2.359, 2.014], abs=1e-3)
    assert levels([6], 0.05) == pytest.approx([0.05], abs=1e-9)
    assert spent(1.0, 0.05) == pytest.approx(0.05, abs=1e-12)


def test_looks_together_err_as_often_as_said() -> None:
    rng, looks, alpha, n = np.random.default_rng(0), [4, 6], 0.05, 200_000
    sums = np.cumsum(rng.standard_normal((n, 6)), axis=1)
    stopped = np.zeros(n, dtype=bool)
    for pairs, level in zip(looks, levels(looks, alpha), strict=True):
        stopped |= sums[:, pairs - 1] / np.sqrt(pairs) > -ndtri(level)
    assert stopped.mean() == pytest.approx(alpha, abs=3 * np.sqrt(alpha * (1 - alpha) / n))
    unspent = (sums[:, 3] / 2 > -ndtri(alpha)) | (sums[:, 5] / np.sqrt(6) > -ndtri(alpha))
    assert unspent.mean() > 1.2 * alpha  # what looking twice for nothing would cost


@pytest.mark.parametrize("looks", [[], [4, 4], [6, 4], [0, 3]])
def test_looks_that_do_not_increase_are_refused(looks: list[int]) -> None:
    with pytest.raises(ValueError, match="numbers that increase"):
        levels(looks)
