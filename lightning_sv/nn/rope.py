"""Angles of rotary position embedding (arXiv:2104.09864), in Hugging Face's rotate-half layout."""

import torch
from torch import Tensor

from lightning_sv.nn.config import RopeScalingConfig
from lightning_sv.scale.shapes import Float


def rope_tables(
    seq_len: int, d_head: int, theta: float, like: Tensor, scaling: RopeScalingConfig | None = None
) -> tuple[Float[Tensor, "{seq_len} 1 {d_head//2}"], Float[Tensor, "{seq_len} 1 {d_head//2}"]]:
    """Return cos and sin of t * theta^(-2i / d_head), each (seq_len, 1, d_head / 2), in float32.

    They are on the device of `like`, and in float64 if it is. `scaling` is that of the low
    frequencies in Llama 3.1.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    i = torch.arange(0, d_head, 2, dtype=dtype, device=like.device)
    t = torch.arange(seq_len, dtype=dtype, device=like.device)
    frequency = 1.0 / theta ** (i / d_head)  # d_head / 2
    if scaling is not None:
        frequency = scaled_frequency(frequency, scaling)
    angle = torch.outer(t, frequency)  # seq_len, d_head / 2
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def scaled_frequency(
    frequency: Float[Tensor, " half"], scaling: RopeScalingConfig
) -> Float[Tensor, " half"]:
    """Divide frequencies of few rotations in the original context by `scaling.factor`."""
    rotations = frequency * scaling.original_context / (2 * torch.pi)
    low = scaling.low_freq_factor
    unchanged = ((rotations - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return frequency * (unchanged + (1 - unchanged) / scaling.factor)
