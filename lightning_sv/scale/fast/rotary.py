"""Rotary position embedding in four passes over memory.

The derivative of a rotation is the rotation by the opposite angle.
"""

from typing import Any

import torch
from torch import Tensor

import lightning_sv.scale.definitions as definitions
from lightning_sv.scale.fast.eager import uses_definition
from lightning_sv.scale.shapes import Float


def rotate(
    x: Float[Tensor, "B T H d_head"],
    tables: tuple[Float[Tensor, "T 1 half"], Float[Tensor, "T 1 half"]],
) -> Float[Tensor, "B T H d_head"]:
    """Rotate the channel pairs (i, i + d_head/2) of x (B, T, H, d_head) by the position's angle.

    The result is computed in x's dtype, as in transformers.
    """
    cos, sin = (table.to(x.dtype) for table in tables)
    if uses_definition():
        return definitions.rotate(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        y = torch.empty_like(x)
        a, b = x.chunk(2, dim=-1)
        out_a, out_b = y.chunk(2, dim=-1)
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, -sin), None, None
