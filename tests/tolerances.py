"""How near two ways to compute the same thing must be, on any machine.

Float32 results differ between CPUs, thread counts and compilers, because sums are added in another order and products
fused otherwise. What is compared is computed in float64, where nothing of that reaches the tolerance. What must run
in a narrower format, because a kernel knows no other or because that is what is trained in, goes through `assert_near`.
"""

import torch
from torch import Tensor


def assert_near(found: Tensor, expected: Tensor, terms: float, size: Tensor | float | None = None) -> None:
    """Assert ||found - expected|| <= terms eps size, with the eps of the narrower of the two formats.

    A sum of n products is off by at most n eps/2 times the sum of their absolute values, in any order, fused or not
    (Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5); errors of operations one after another add up.
    So `terms` is the length of the longest chain of additions and roundings behind one entry: twice a bound that no
    machine exceeds where nothing cancels. A single entry may be what is left of a cancellation, with a relative error
    of any size; a norm over all entries is not, unless the formula cancels as a whole, and then `size` says what does.

    Args:
        found: what is tested.
        expected: the oracle's, in float64 or as wide as `found`.
        terms: additions and roundings one after another.
        size: norm of what is added up where that is not the norm of `expected`.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    eps = max(torch.finfo(x.dtype).eps for x in (found, expected))
    wide = expected.detach().double()
    size = float(wide.norm() if size is None else size)
    error = float((found.detach().double() - wide).norm())
    assert error <= terms * eps * size, (
        f"off by {error:.3g}; {terms:g} roundings of {size:.3g} are {terms * eps * size:.3g}"
    )
