"""SwiGLU (arXiv:2002.05202) that saves only its inputs, also with the norms of both branches.

Between two matrices, silu(gate) * up is the widest tensor of a dense block. In plain PyTorch with
norms, autograd saves five tensors of its size. Here it saves gate and up, and backward makes the
rest again, in row chunks that fit the cache of a CPU:

    gate, up (rows, d_ff) --chunk--> norms, silu, product --> y (rows, d_ff)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lightning_sv.scale.definitions as definitions
from lightning_sv.scale.definitions import upcast
from lightning_sv.scale.fast.eager import definition_gradients, row_chunks, rows_of, uses_definition
from lightning_sv.scale.fast.norm import (
    add_norm_gradients,
    inverse_rms,
    normalize,
    scale_inplace,
    zeros_for_gradient,
)
from lightning_sv.scale.shapes import Float


def swiglu(
    gate: Float[Tensor, "*rows d"], up: Float[Tensor, "*rows d"], weight: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows d"]:
    """Return weight * silu(gate) * up, in the dtype of gate.

    Autograd saves only the arguments; backward recomputes silu(gate). If a linear map follows,
    apply `weight` here and not to its output: the result is the same, and the output is not saved
    for the gradient.
    """
    if uses_definition():
        return definitions.swiglu(gate, up, weight)
    return _SwiGLU.apply(gate, up, weight)


class _SwiGLU(torch.autograd.Function):
    """Full buffers for the results only.

    On a CPU it takes 0.95 to 1.25 (float32) or about 1.6 (bf16) times as long as the definition,
    and saves three tensors instead of five.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        rows = (rows_of(y), rows_of(gate), rows_of(up), weight.reshape(-1, 1))
        for out, g, u, w in row_chunks(*rows):
            torch.mul(F.silu(g), u, out=out).mul_(w.to(out.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(definition_gradients(definitions.swiglu, (gate, up, weight), grads[0]))

        grad = grads[0].contiguous()
        grad_gate = torch.empty_like(grad)
        grad_up = torch.empty_like(grad)
        # contiguous, so that its reshape below is a view
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        given = (rows_of(grad), rows_of(gate), rows_of(up), weight.reshape(-1, 1))
        results = (rows_of(grad_gate), rows_of(grad_up), grad_weight.reshape(-1, 1))
        for dy, g, u, w, dg, du, dw in row_chunks(*given, *results):
            torch.mul(F.silu(g), dy, out=du)
            torch.sum(du * u, -1, keepdim=True, out=dw)
            w = w.to(dy.dtype)
            du.mul_(w)
            grad_hidden = (dy * u).mul_(w)
            torch.ops.aten.silu_backward.grad_input(grad_hidden, g, grad_input=dg)
        return grad_gate, grad_up, grad_weight


def normed_swiglu(
    gate: Float[Tensor, "*rows d"],
    up: Float[Tensor, "*rows d"],
    gamma_gate: Float[Tensor, " d"] | None,
    gamma_up: Float[Tensor, " d"] | None,
    eps: tuple[float, float],
) -> Float[Tensor, "*rows d"]:
    """Return silu(gamma_gate * Norm(gate)) * gamma_up * Norm(up).

    For eager mode with gradients only. Computed in float32 or wider and rounded once.

    Args:
        gate: output of the gate's matrix
        up: output of up's matrix
        gamma_gate: scale vector after the gate's norm
        gamma_up: scale vector after up's norm
        eps: epsilons of the two norms
    """
    return _NormedSwiGLU.apply(gate, up, gamma_gate, gamma_up, eps)


class _NormedSwiGLU(torch.autograd.Function):
    """Saves gate, up and their 1/rms, and normalizes again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        gamma_gate: Tensor | None,
        gamma_up: Tensor | None,
        eps: tuple[float, float],
    ) -> Tensor:
        rrms_gate = inverse_rms(gate, eps[0])
        rrms_up = inverse_rms(up, eps[1])
        ctx.eps = eps
        ctx.save_for_backward(gate, up, gamma_gate, gamma_up, rrms_gate, rrms_up)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for out, g, u, r_gate, r_up in row_chunks(*map(rows_of, (y, gate, up, rrms_gate, rrms_up))):
            hidden = F.silu(scale_inplace(upcast(g) * r_gate, gamma_gate), inplace=True)
            torch.mul(hidden, scale_inplace(upcast(u) * r_up, gamma_up), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate, up, gamma_gate, gamma_up, rrms_gate, rrms_up = ctx.saved_tensors
        if torch.is_grad_enabled():

            def definition(
                gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None
            ) -> Tensor:
                hidden = F.silu(normalize(gate, ctx.eps[0], gamma_gate))
                return hidden * normalize(up, ctx.eps[1], gamma_up)

            return *definition_gradients(definition, (gate, up, gamma_gate, gamma_up), grad), None

        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        grad_up = torch.empty_like(up, memory_format=torch.contiguous_format)
        grad_gamma_gate = zeros_for_gradient(gamma_gate)
        grad_gamma_up = zeros_for_gradient(gamma_up)
        rows = map(rows_of, (grad, gate, up, rrms_gate, rrms_up, grad_gate, grad_up))
        for dy, g, u, r_gate, r_up, out_gate, out_up in row_chunks(*rows):
            dy = upcast(dy)
            ghat = upcast(g) * r_gate
            uhat = upcast(u) * r_up
            scaled = ghat if gamma_gate is None else ghat * gamma_gate
            hidden = F.silu(scaled)
            add_norm_gradients(hidden.mul_(dy), uhat, r_up, gamma_up, out_up, grad_gamma_up)
            grad_hidden = scale_inplace(uhat, gamma_up).mul_(dy)
            dg = torch.ops.aten.silu_backward(grad_hidden, scaled)
            add_norm_gradients(dg, ghat, r_gate, gamma_gate, out_gate, grad_gamma_gate)
        return grad_gate, grad_up, grad_gamma_gate, grad_gamma_up, None
