"""SwiGLU of two normalized and scaled branches, as one Triton kernel each way.

Backward reads the gradient, gate and up once, and gives their gradients and, in parts that are summed after it, those
in the two scale vectors: the compiler's own kernels read all three a second time for those.

N rows, F hidden units; a program has one row at a time, whole in its registers, and in backward one after another.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.double_backward import reference_gradients
from lightning_sv.scale.grouped_mm import wide_empty
from lightning_sv.scale.norm import normalize
from lightning_sv.scale.shapes import Float

#: programs of a backward pass, each with a part of the scale vectors' gradients: two a multiprocessor of an H200
PROGRAMS = 264


def normed_swiglu(
    gate: Float[Tensor, "*rows F"],
    up: Float[Tensor, "*rows F"],
    gamma_gate: Float[Tensor, " F"] | None,
    gamma_up: Float[Tensor, " F"] | None,
    eps: float,
) -> Float[Tensor, "*rows F"]:
    """Return silu(gamma_gate * Norm(gate)) * gamma_up * Norm(up), rounded to gate's dtype once.

    Args:
        gate: (..., F)
        up: (..., F), of the same dtype
        gamma_gate: (F,), or None for 1
        gamma_up: (F,), or None for 1
        eps: added to both mean squares
    """
    one = torch.ones(gate.shape[-1:], dtype=_wide(gate), device=gate.device)
    gammas = [one if gamma is None else gamma.contiguous() for gamma in (gamma_gate, gamma_up)]
    rows = (_packed(x.flatten(0, -2)) for x in (gate, up))
    out: Tensor = _normed_swiglu(*rows, *gammas, eps)[0]
    return out.view(gate.shape)


# The compiler pads rows whose width is unaligned, and the products that read what the kernels write want it so too:
# rows may have any distance. Told nothing, it would copy them to where the traced ones were.
_STRIDED = (torch.Tag.needs_fixed_stride_order,)


@torch.library.custom_op("lightning_sv::normed_swiglu", mutates_args=(), tags=_STRIDED)
def _normed_swiglu(gate: Tensor, up: Tensor, gamma_gate: Tensor, gamma_up: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rrms = _results(gate)
    _forward[rrms.shape[1:]](  # type: ignore[arg-type]
        gate, up, gamma_gate, gamma_up, y, rrms, len(y), gate.stride(0), up.stride(0), y.stride(0), eps,
        **_sizes_of(gate),
    )  # fmt: skip
    return y, rrms


@torch.library.custom_op("lightning_sv::normed_swiglu_backward", mutates_args=(), tags=_STRIDED)
def _normed_swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gamma_gate: Tensor, gamma_up: Tensor, rrms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad = _packed(grad)
    grad_gate, grad_up, parts = _gradients(gate)
    _backward[parts.shape[1:2]](  # type: ignore[arg-type]
        grad, gate, up, gamma_gate, gamma_up, rrms, grad_gate, grad_up, parts,
        len(grad), grad.stride(0), gate.stride(0), up.stride(0), grad_gate.stride(0),
        ROWS=triton.cdiv(len(grad), PROGRAMS), **_sizes_of(gate),
    )  # fmt: skip
    return grad_gate, grad_up, parts


@_normed_swiglu.register_fake
def _(gate: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(gate)


@_normed_swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(gate)


def _results(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for the result, and for 1/rms of both, (2, N)."""
    return wide_empty(gate, *gate.shape), gate.new_empty(2, len(gate), dtype=_wide(gate))


def _gradients(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the gradients in gate and up, and for the parts (2, P, F) of those in their scale vectors."""
    programs = triton.cdiv(len(gate), triton.cdiv(len(gate), PROGRAMS))
    parts = gate.new_empty(2, programs, gate.shape[1], dtype=_wide(gate))
    return wide_empty(gate, *gate.shape), wide_empty(gate, *gate.shape), parts


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, rrms = ctx.saved_tensors
    if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the plain form

        def plain(gate: Tensor, up: Tensor, gamma_gate: Tensor, gamma_up: Tensor) -> Tensor:
            return F.silu(normalize(gate, ctx.eps, gamma_gate)) * normalize(up, ctx.eps, gamma_up)

        return *reference_gradients(plain, inputs, grad), None
    grad_gate, grad_up, parts = _normed_swiglu_backward(grad, *inputs, rrms)
    grad_gammas = (total.to(gamma.dtype) for total, gamma in zip(parts.sum(1), inputs[2:], strict=True))
    return grad_gate, grad_up, *grad_gammas, None


_normed_swiglu.register_autograd(_differentiate, setup_context=_save)


def _packed(rows: Tensor) -> Tensor:
    """Return rows whose entries lie next to each other: the kernels have a stride for rows alone."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sizes_of(gate: Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(gate.shape[-1])
    return {
        "F": gate.shape[-1],
        "BLOCK": block,
        "WIDE": tl.float64 if gate.dtype == torch.float64 else tl.float32,
        "num_warps": min(max(block // 256, 1), 16),
    }


@triton.jit
def _forward(  # noqa: PLR0913 (a kernel's tensors and sizes)
    gate_at, up_at, gamma_gate_at, gamma_up_at, y_at, rrms_at, n, gate_by, up_by, y_by, eps,
    F: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    i, row = tl.arange(0, BLOCK), tl.program_id(0)
    long = row.to(tl.int64)
    gate = tl.load(gate_at + long * gate_by + i, i < F, 0.0).to(WIDE)
    up = tl.load(up_at + long * up_by + i, i < F, 0.0).to(WIDE)
    rrms_gate = 1.0 / tl.sqrt(tl.sum(gate * gate, 0) / F + eps)
    rrms_up = 1.0 / tl.sqrt(tl.sum(up * up, 0) / F + eps)
    tl.store(rrms_at + row, rrms_gate)
    tl.store(rrms_at + n + row, rrms_up)
    gate *= rrms_gate * tl.load(gamma_gate_at + i, i < F, 0.0).to(WIDE)
    up *= rrms_up * tl.load(gamma_up_at + i, i < F, 0.0).to(WIDE)
    tl.store(y_at + long * y_by + i, gate / (1.0 + tl.exp(-gate)) * up, i < F)


@triton.jit
def _backward(  # noqa: PLR0913
    grad_at, gate_at, up_at, gamma_gate_at, gamma_up_at, rrms_at, grad_gate_at, grad_up_at, parts_at,
    n, grad_by, gate_by, up_by, out_by,
    F: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    sum_gate = tl.zeros((BLOCK,), WIDE)
    sum_up = tl.zeros((BLOCK,), WIDE)
    for step in range(ROWS):
        row = tl.program_id(0) * ROWS + step
        there = (i < F) & (row < n)
        long = row.to(tl.int64)
        rrms_gate = tl.load(rrms_at + row, row < n, 0.0).to(WIDE)
        rrms_up = tl.load(rrms_at + n + row, row < n, 0.0).to(WIDE)
        gate = (
            tl.load(gate_at + long * gate_by + i, there, 0.0).to(WIDE) * rrms_gate
        )  # of Norm(gate) and Norm(up) from here on
        up = tl.load(up_at + long * up_by + i, there, 0.0).to(WIDE) * rrms_up
        gamma_gate = tl.load(gamma_gate_at + i, i < F, 0.0).to(WIDE)
        gamma_up = tl.load(gamma_up_at + i, i < F, 0.0).to(WIDE)
        grad = tl.load(grad_at + long * grad_by + i, there, 0.0).to(WIDE)
        scaled = gate * gamma_gate
        share = 1.0 / (1.0 + tl.exp(-scaled))
        grad_up = grad * scaled * share
        grad_gate = grad * up * gamma_up * share * (1.0 + scaled * (1.0 - share))
        sum_up += grad_up * up
        sum_gate += grad_gate * gate
        grad_up *= gamma_up
        grad_gate *= gamma_gate
        mean_up = tl.sum(grad_up * up, 0) / F
        mean_gate = tl.sum(grad_gate * gate, 0) / F
        tl.store(grad_up_at + long * out_by + i, rrms_up * (grad_up - up * mean_up), there)
        tl.store(grad_gate_at + long * out_by + i, rrms_gate * (grad_gate - gate * mean_gate), there)
    part = tl.program_id(0) * F + i
    tl.store(parts_at + part, sum_gate, i < F)
    tl.store(parts_at + tl.num_programs(0) * F + part, sum_up, i < F)
