"""What the model computes between its parameters, in plain PyTorch.

    normalize              gamma * x / sqrt(mean(x^2) + eps)
    scaled_product         gamma_out * (W (gamma_in * x)) = (diag(gamma_out) W diag(gamma_in)) x
    inverse_rms_of_product 1 / sqrt(mean((W (gamma_in * x))^2) + eps)
    swiglu                 weight * silu(gate) * up
    rotate                 (a + i b) exp(i angle) of the channel pairs (a, b)
    next_token_loss        mean cross-entropy in nats

Compiled and traced code, torch.func and passes without gradients run these functions. Eager mode
runs the function of the same name in `scale/fast`, if there is one: equal values, fewer passes over
memory, less saved for backward.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.shapes import Float, Int


def normalize(
    x: Float[Tensor, "*rows d"], eps: float, gamma: Float[Tensor, "... d"] | None
) -> Float[Tensor, "*rows d"]:
    """Return gamma * x / sqrt(mean(x^2) + eps), in x's dtype, computed in float32 or wider."""
    wide = upcast(x)
    y: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        y = y * gamma
    return y.to(x.dtype)


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def effective_weight(
    weight: Float[Tensor, "*batch_dims d_out d_in"],
    gamma_in: Float[Tensor, "*batch_dims d_in"] | None,
    gamma_out: Float[Tensor, "*batch_dims d_out"] | None,
) -> Float[Tensor, "*batch_dims d_out d_in"]:
    """Return diag(gamma_out) W diag(gamma_in), (..., d_out, d_in); paper, Section 3.4."""
    if gamma_in is not None:
        weight = weight * gamma_in.unsqueeze(-2)
    if gamma_out is not None:
        weight = weight * gamma_out.unsqueeze(-1)
    return weight


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a product with `weight`: autocast's if enabled, else the weight's."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch raises an error for meta
        return weight.dtype
    return torch.get_autocast_dtype(device)


def scaled_product(
    x: Float[Tensor, "... d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None,
    gamma_out: Float[Tensor, " d_out"] | None,
) -> Float[Tensor, "... d_out"]:
    """Return gamma_out * (W (gamma_in * x)), folded first.

    The compiler fuses the fold with the cast.
    """
    dtype = product_dtype(x, weight)
    return F.linear(x.to(dtype), effective_weight(weight, gamma_in, gamma_out).to(dtype))


def swiglu(
    gate: Float[Tensor, "*rows d"], up: Float[Tensor, "*rows d"], weight: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows d"]:
    """Return weight * silu(gate) * up, in the dtype of gate."""
    return F.silu(gate) * up * weight.to(gate.dtype).unsqueeze(-1)


def rotate(
    x: Float[Tensor, "B T H d_head"],
    tables: tuple[Float[Tensor, "T 1 half"], Float[Tensor, "T 1 half"]],
) -> Float[Tensor, "B T H d_head"]:
    """Rotate the channel pairs (i, i + d_head/2) by the angle of their position.

    The result is computed in x's dtype, as in transformers.
    """
    cos, sin = (table.to(x.dtype) for table in tables)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def next_token_loss(
    logits: Float[Tensor, "*tokens vocab_size"], targets: Int[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token, in float32 (wider inputs keep their width).

    Args:
        logits: (..., vocab_size), of any float dtype
        targets: (...) token ids, one position ahead of the inputs. Every target is a token id:
            `linear_cross_entropy` does not support ignored targets, such as -100
    """
    return F.cross_entropy(upcast(logits.flatten(0, -2)), targets.flatten())
