"""Rotary position embedding (arXiv:2104.09864), in Hugging Face's rotate-half layout."""

import torch
from torch import Tensor


def rope_tables(seq_len: int, d_head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of t * theta^(-2i / d_head), each (seq_len, d_head / 2), float32."""
    i = torch.arange(0, d_head, 2, dtype=torch.float32, device=device)
    t = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(t, 1.0 / theta ** (i / d_head))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the channel pairs (i, i + d_head/2) of x by the position's angle.

    Args:
        x: (B, H, T, d_head).
        tables: cos and sin, each (T, d_head / 2).
    """
    cos, sin = (table.to(x.dtype) for table in tables)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
