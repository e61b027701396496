"""Rotary position embedding (arXiv:2104.09864), in Hugging Face's rotate-half layout."""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.nn.config import RopeScalingConfig
from lightning_sv.scale.eager import uses_reference
from lightning_sv.scale.shapes import Float


def rope_tables(
    seq_len: int, d_head: int, theta: float, like: Tensor, scaling: RopeScalingConfig | None = None
) -> tuple[Float[Tensor, "{seq_len} 1 {d_head//2}"], Float[Tensor, "{seq_len} 1 {d_head//2}"]]:
    """Return cos and sin of t * theta^(-2i / d_head), each (seq_len, 1, d_head / 2), in float32.

    They are on the device of `like`, and in float64 if it is. `scaling` is that of the low frequencies in Llama 3.1.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    i = torch.arange(0, d_head, 2, dtype=dtype, device=like.device)
    t = torch.arange(seq_len, dtype=dtype, device=like.device)
    frequency = 1.0 / theta ** (i / d_head)
    if scaling is not None:
        rotations, low = frequency * scaling.original_context / (2 * torch.pi), scaling.low_freq_factor
        weight = ((rotations - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
        frequency = frequency * (weight + (1 - weight) / scaling.factor)
    angle = torch.outer(t, frequency)
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def rotate(
    x: Float[Tensor, "B T H d_head"], tables: tuple[Float[Tensor, "T 1 half"], Float[Tensor, "T 1 half"]]
) -> Float[Tensor, "B T H d_head"]:
    """Rotate the channel pairs (i, i + d_head/2) of x (B, T, H, d_head) by the position's angle."""
    cos, sin = (table.to(x.dtype) for table in tables)
    if uses_reference():
        return _rotate(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _Rotate(torch.autograd.Function):
    """`_rotate` for eager mode, in four passes; the derivative is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        y = torch.empty_like(x)
        (a, b), (out_a, out_b) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grads[0], cos, -sin), None, None
