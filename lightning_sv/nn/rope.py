"""Rotary position embedding (arXiv:2104.09864), in Hugging Face's rotate-half layout."""

import torch
from torch import Tensor


def rope_tables(seq_len: int, d_head: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of t * theta^(-2i / d_head), each (seq_len, 1, d_head / 2), in float32.

    Args:
        seq_len: positions.
        d_head: channels that are rotated.
        theta: the base.
        like: gives the device, and float64 for float64 activations.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    i = torch.arange(0, d_head, 2, dtype=dtype, device=like.device)
    t = torch.arange(seq_len, dtype=dtype, device=like.device)
    angle = torch.outer(t, 1.0 / theta ** (i / d_head))
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the channel pairs (i, i + d_head/2) of x by the position's angle.

    Args:
        x: (B, T, H, d_head).
        tables: cos and sin, each (T, 1, d_head / 2).
    """
    cos, sin = (table.to(x.dtype) for table in tables)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
