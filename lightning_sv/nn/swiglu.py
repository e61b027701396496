"""The gated activation of SwiGLU (arXiv:2002.05202), with an optional weight a row."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.twice import plain_gradients

#: elements of a piece: about the smallest whose overhead is not felt
PIECE = 1 << 17


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return weight * silu(gate) * up.

    Autograd keeps the arguments alone; silu(gate) is computed again in backward. A linear map after it gives
    the same with `weight` before it as after it, and before it nothing but these need be kept for its gradient.

    Args:
        gate: (..., d).
        up: (..., d), of the same dtype.
        weight: (...), or None for 1.

    Returns:
        (..., d), in the dtype of gate.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _swiglu(gate, up, weight)  # the compiler fuses it
    out: Tensor = _SwiGLU.apply(gate, up, weight)
    return out


def _swiglu(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    y = F.silu(gate) * up
    return y if weight is None else y * weight.to(y.dtype).unsqueeze(-1)


class _SwiGLU(torch.autograd.Function):
    """`_swiglu` for eager mode, on the CPU in pieces, so that no whole buffer is needed but the results.

    It takes 0.95 to 1.25 (float32) and about 1.6 (bf16) of the time of the plain form on a CPU, for three kept
    tensors in place of five.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for out, g, u, w in _pieces(y, gate, up, weight):
            torch.mul(F.silu(g), u, out=out)
            if w is not None:
                out.mul_(w.to(out.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate, up, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the plain form
            return tuple(plain_gradients(_swiglu, (gate, up, weight), grad))
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
        grad_weight = None if weight is None else torch.empty_like(weight)
        for dg, du, dw, dy, g, u, w in _pieces(grad_gate, grad_up, grad_weight, grad, gate, up, weight):
            torch.mul(F.silu(g), dy, out=du)
            if w is not None:
                torch.sum(du * u, -1, keepdim=True, out=dw)
                w = w.to(dy.dtype)
                du.mul_(w)
            dy = dy * u if w is None else (dy * u).mul_(w)
            torch.ops.aten.silu_backward.grad_input(dy, g, grad_input=dg)
        return grad_gate, grad_up, grad_weight


def _pieces(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Zip the same rows of every tensor; those with an axis less, the weights, as a column."""
    d = first.shape[-1]
    n = max(PIECE // d, 1) if first.device.type == "cpu" else max(first.numel() // d, 1)

    def split(t: Tensor | None) -> Iterable[Tensor | None]:
        return repeat(None) if t is None else t.reshape(-1, d if t.dim() == first.dim() else 1).split(n)

    return zip(*map(split, (first, *others)), strict=False)
