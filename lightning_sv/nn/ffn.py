"""The SwiGLU feed-forward network (arXiv:2002.05202), with the norms of its branches or a weight per row."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sv.nn.config import BackboneConfig
from lightning_sv.scale import Branch, Output, ScaleBuilder
from lightning_sv.scale.eager import reference_gradients, row_chunks, uses_reference
from lightning_sv.scale.norm import add_norm_gradients, inverse_rms, normalize, scale_inplace, upcast
from lightning_sv.scale.shapes import Float


class FeedForward(nn.Module):
    """down_proj(silu(gate) * up), including the norm before gate and up."""

    def __init__(self, config: BackboneConfig, build: ScaleBuilder):
        super().__init__()
        d_ff = config.ffn_width
        branch = Branch(d_ff, norm_width=d_ff)  # dnp normalizes over the hidden units
        self.gate_up = build.group("ffn_norm", config.d_model, {"gate_proj": branch, "up_proj": branch})
        self.down_proj = build.linear("down_proj", d_ff, config.d_model)

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], None]:
        """(B, T, D) -> (B, T, D), and None for no routing; x is the residual stream before the norm."""
        return self.down_proj(swiglu_outputs(*self.gate_up.outputs(x))), None


def swiglu_outputs(gate: Output, up: Output) -> Tensor:
    """Return silu(gate) * up of two branches, after their norms and scales.

    If both are normalized, autograd saves only the two products instead of five tensors of their size.
    """
    if uses_reference() or not (gate.one_norm and up.one_norm):
        return F.silu(gate.finish()) * up.finish()
    return _NormedSwiGLU.apply(gate.product, up.product, gate.gamma, up.gamma, (gate.eps, up.eps))


class _NormedSwiGLU(torch.autograd.Function):
    """silu(gamma_gate * Norm(gate)) * gamma_up * Norm(up), in row chunks that fit the CPU cache.

    Computed in float32 or wider and rounded once. Saves gate, up and their 1/rms, and normalizes again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None, eps: tuple[float, float]
    ) -> Tensor:
        rrms_gate, rrms_up = inverse_rms(gate, eps[0]), inverse_rms(up, eps[1])
        ctx.save_for_backward(gate, up, gamma_gate, gamma_up, rrms_gate, rrms_up)
        ctx.eps = eps
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for out, g, u, r_gate, r_up in row_chunks(*_rows(y, gate, up, rrms_gate, rrms_up)):
            hidden = F.silu(scale_inplace(upcast(g) * r_gate, gamma_gate), inplace=True)
            torch.mul(hidden, scale_inplace(upcast(u) * r_up, gamma_up), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate, up, gamma_gate, gamma_up, rrms_gate, rrms_up = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate the reference

            def plain(gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None) -> Tensor:
                return F.silu(normalize(gate, ctx.eps[0], gamma_gate)) * normalize(up, ctx.eps[1], gamma_up)

            return *reference_gradients(plain, (gate, up, gamma_gate, gamma_up), grad), None
        grad_gate, grad_up = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, up))
        grad_gammas = [None if gamma is None else torch.zeros_like(upcast(gamma)) for gamma in (gamma_gate, gamma_up)]
        rows = _rows(grad, gate, up, rrms_gate, rrms_up, grad_gate, grad_up)
        for dy, g, u, r_gate, r_up, out_gate, out_up in row_chunks(*rows):
            dy, ghat, uhat = upcast(dy), upcast(g) * r_gate, upcast(u) * r_up
            scaled = ghat if gamma_gate is None else ghat * gamma_gate
            hidden = F.silu(scaled)
            add_norm_gradients(hidden.mul_(dy), uhat, r_up, gamma_up, out_up, grad_gammas[1])
            dg = torch.ops.aten.silu_backward(scale_inplace(uhat, gamma_up).mul_(dy), scaled)
            add_norm_gradients(dg, ghat, r_gate, gamma_gate, out_gate, grad_gammas[0])
        return grad_gate, grad_up, *grad_gammas, None


def swiglu(
    gate: Float[Tensor, "*rows d"], up: Float[Tensor, "*rows d"], weight: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows d"]:
    """Return weight * silu(gate) * up, in the dtype of gate.

    Autograd saves only the arguments; backward recomputes silu(gate). If a linear map follows, apply `weight` here and
    not to its output: the result is the same, and the output is not saved for the gradient.
    """
    if uses_reference():
        return _swiglu(gate, up, weight)
    return _SwiGLU.apply(gate, up, weight)


def _swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.silu(gate) * up * weight.to(gate.dtype).unsqueeze(-1)


class _SwiGLU(torch.autograd.Function):
    """`_swiglu` for eager mode, in chunks of rows on the CPU, with full buffers for the results only.

    On a CPU it takes 0.95 to 1.25 (float32) or about 1.6 (bf16) times as long as the reference, and saves three tensors
    instead of five.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for out, g, u, w in row_chunks(*_rows(y, gate, up), weight.reshape(-1, 1)):
            torch.mul(F.silu(g), u, out=out).mul_(w.to(out.dtype))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        gate, up, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate the reference
            return tuple(reference_gradients(_swiglu, (gate, up, weight), grad))
        grad = grad.contiguous()
        grad_gate, grad_up, grad_weight = (torch.empty_like(t) for t in (grad, grad, weight))
        rows, columns = _rows(grad_gate, grad_up, grad, gate, up), (t.reshape(-1, 1) for t in (weight, grad_weight))
        for dg, du, dy, g, u, w, dw in row_chunks(*rows, *columns):
            torch.mul(F.silu(g), dy, out=du)
            torch.sum(du * u, -1, keepdim=True, out=dw)
            w = w.to(dy.dtype)
            du.mul_(w)
            dy = (dy * u).mul_(w)
            torch.ops.aten.silu_backward.grad_input(dy, g, grad_input=dg)
        return grad_gate, grad_up, grad_weight


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [t.reshape(-1, t.shape[-1]) for t in tensors]
