"""The branches of a norm as one product: q, k and v, or gate and up.

    [y_q; y_k; y_v] = [W_q diag(gamma_q); W_k diag(gamma_k); W_v diag(gamma_v)] Norm(x)

Every branch keeps its own matrix and vectors as parameters. The compiler casts and scales them
anyway, and here it writes the results next to each other, for one larger product. `BranchGroup`
computes one product per branch; this is a candidate beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.branch import BranchGroup, Output, ScaledLinear
from lightning_sv.scale.definitions import effective_weight, product_dtype


@contextmanager
def joint_products() -> Iterator[None]:
    """Let all groups of branches compute one product; models are compiled within the context."""
    with (
        patch.object(BranchGroup, "outputs", joint_outputs),
        patch.object(BranchGroup, "forward", joint_forward),
    ):
        yield


def joint_forward(group: BranchGroup, x: Tensor) -> tuple[Tensor, ...]:
    """(B, T, d_in) -> one (B, T, d_out) per branch, as `BranchGroup.forward`."""
    return tuple(output.finish() for output in joint_outputs(group, x))


def joint_outputs(group: BranchGroup, x: Tensor) -> tuple[Output, ...]:
    """Return the outputs of the branches before their norms, as `BranchGroup.outputs`."""
    xhat = group.norm(x)
    branches = [branch for _, branch in group.branches()]
    gammas = [_own_gammas(group, name) for name in group.names]
    dtype = product_dtype(xhat, branches[0].weight)

    folded = []
    for branch, (gamma_in, gamma_out) in zip(branches, gammas, strict=True):
        before_norm = gamma_out if branch.norm_width is None else None
        folded.append(effective_weight(branch.weight, gamma_in, before_norm).to(dtype))

    product = F.linear(xhat.to(dtype), torch.cat(folded))
    parts = product.split([branch.d_out for branch in branches], dim=-1)
    return tuple(
        _output(part, branch, gamma_out)
        for part, branch, (_, gamma_out) in zip(parts, branches, gammas, strict=True)
    )


def _own_gammas(group: BranchGroup, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return the gammas of a branch that the norm before it does not apply."""
    scale_in, scale_out = group.vectors(name)
    if scale_in is group.norm.scale:
        scale_in = None
    gamma_in = None if scale_in is None else scale_in()
    gamma_out = None if scale_out is None else scale_out()
    return gamma_in, gamma_out


def _output(product: Tensor, branch: ScaledLinear, gamma_out: Tensor | None) -> Output:
    gamma_after = None if branch.norm_width is None else gamma_out
    return Output(product, branch.norm_width, branch.eps, gamma_after)
