"""How near two ways to compute the same thing must be, on any machine.

Float32 results differ between CPUs, thread counts and compilers, because the order of sums and the
fusion of products differ. Values are compared in float64, so that these differences are below the
tolerance. For a narrower format, if the kernel or the training needs it, there is `assert_near`.
"""

import torch
from torch import Tensor


def assert_near(
    found: Tensor, expected: Tensor, terms: float, size: Tensor | float | None = None
) -> None:
    """Assert ||found - expected|| <= terms eps size, with the eps of the narrower of the two
    formats.

    A sum of n products is off by at most n eps/2 times the sum of their absolute values, in any
    order, fused or not (Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5); errors of
    successive operations add up. So `terms` is the length of the longest chain of additions and
    roundings behind one entry: twice a bound that no machine exceeds if nothing cancels. A single
    entry may be the rest of a cancellation, with a relative error of any size. A norm over all
    entries is not, unless the formula itself cancels; then `size` is the norm of its terms.

    Args:
        found: tested values.
        expected: the oracle's, in float64 or as wide as `found`.
        terms: successive additions and roundings.
        size: norm of the summands, if it is not the norm of `expected`.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    eps = max(torch.finfo(x.dtype).eps for x in (found, expected))
    wide = expected.detach().double()
    size = float(wide.norm() if size is None else size)
    error = float((found.detach().double() - wide).norm())
    assert error <= terms * eps * size, (
        f"off by {error:.3g}; {terms:g} roundings of {size:.3g} are {terms * eps * size:.3g}"
    )
