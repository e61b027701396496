"""Norm over the head width, scale and RoPE of q, k or v, as one Triton kernel each way.

Forward reads x and writes y. Backward reads the gradient and x once, and gives the gradient in x and, in parts that are
summed after it, the one in gamma: the compiler's own kernels read both a second time for that.

N tokens, H heads, K head width; a program has BLOCK_N tokens of one head at a time, as the two halves that RoPE turns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sv.nn.rope import Tables, rotate
from lightning_sv.scale.double_backward import reference_gradients
from lightning_sv.scale.norm import normalize
from lightning_sv.scale.shapes import Float

#: tokens that a program has at a time, and how often: no more are summed into one part of gamma's gradient
BLOCK_N, STEPS = 32, 8


def norm_rotate(
    x: Float[Tensor, "B T H K"], gamma: Float[Tensor, "H K"] | None, eps: float, tables: Tables | None
) -> Float[Tensor, "B T H K"]:
    """Return rotate(gamma * Norm(x)), rounded to x's dtype once.

    Args:
        x: (B, T, H, K)
        gamma: (H, K), or None for 1
        eps: added to the mean square
        tables: cos and sin of the rotation, each (T, 1, K / 2); None for none
    """
    if gamma is None:
        gamma = torch.ones(x.shape[-2:], dtype=_wide(x), device=x.device)
    cos, sin = (None, None) if tables is None else tables
    out: Tensor = _norm_rotate(x.contiguous(), gamma.contiguous(), eps, cos, sin)
    return out


@torch.library.custom_op("lightning_sv::norm_rotate", mutates_args=())
def _norm_rotate(x: Tensor, gamma: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    (n, heads), sizes = _grid_of(x), _sizes_of(x, cos)
    grid = (triton.cdiv(n, BLOCK_N), heads)
    _forward[grid](x, gamma, *_tables(cos, sin, gamma), y, n, eps, **sizes)  # type: ignore[arg-type]
    return y


@torch.library.custom_op("lightning_sv::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward(
    grad: Tensor, x: Tensor, gamma: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_x, parts = _gradients(x)
    grid = parts.shape[:2]
    tables = _tables(cos, sin, gamma)
    _backward[grid](grad, x, gamma, *tables, grad_x, parts, _grid_of(x)[0], eps, STEPS=STEPS, **_sizes_of(x, cos))  # type: ignore[arg-type]
    return grad_x, parts


@_norm_rotate.register_fake
def _(x: Tensor, gamma: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@_norm_rotate_backward.register_fake
def _(grad: Tensor, x: Tensor, gamma: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _gradients(x)


def _gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for the gradient in x, and for the parts (P, H, K) of that in gamma."""
    n, heads = _grid_of(x)
    parts = x.new_empty(triton.cdiv(n, BLOCK_N * STEPS), heads, x.shape[-1], dtype=_wide(x))
    return torch.empty_like(x), parts


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gamma, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(x, gamma, cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    x, gamma, cos, sin = ctx.saved_tensors
    if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the plain form

        def plain(x: Tensor, gamma: Tensor) -> Tensor:
            y = normalize(x, ctx.eps, gamma)
            return y if cos is None else rotate(y, (cos, sin))

        return *reference_gradients(plain, (x, gamma), grad), None, None, None  # type: ignore[return-value]
    grad_x, parts = _norm_rotate_backward(grad.contiguous(), x, gamma, ctx.eps, cos, sin)
    return grad_x, parts.sum(0).to(gamma.dtype), None, None, None


_norm_rotate.register_autograd(_differentiate, setup_context=_save)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _grid_of(x: Tensor) -> tuple[int, int]:
    """Return tokens and heads of (B, T, H, K)."""
    return x.shape[0] * x.shape[1], x.shape[2]


def _tables(cos: Tensor | None, sin: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous tables; where there is no rotation, what is not looked at."""
    return (other, other) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())


def _sizes_of(x: Tensor, cos: Tensor | None) -> dict[str, Any]:
    half = x.shape[-1] // 2
    return {
        "T": x.shape[1],
        "H": x.shape[2],
        "HALF": half,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": triton.next_power_of_2(half),
        "ROTATES": cos is not None,
        "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "num_warps": 4,
    }


@triton.jit
def _forward(  # noqa: PLR0913 (a kernel's tensors and sizes)
    x_at, gamma_at, cos_at, sin_at, y_at, n, eps,
    T: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROTATES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head, i = tl.program_id(1), tl.arange(0, BLOCK_K)[None, :]
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    there = (row < n) & (i < HALF)
    at = (row.to(tl.int64) * H + head) * (2 * HALF) + i
    a = tl.load(x_at + at, there, 0.0).to(WIDE)
    b = tl.load(x_at + at + HALF, there, 0.0).to(WIDE)
    gamma_a = tl.load(gamma_at + head * (2 * HALF) + i, i < HALF, 0.0).to(WIDE)
    gamma_b = tl.load(gamma_at + head * (2 * HALF) + HALF + i, i < HALF, 0.0).to(WIDE)
    rrms = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
    a, b = a * rrms * gamma_a, b * rrms * gamma_b
    if ROTATES:
        cos = tl.load(cos_at + (row % T) * HALF + i, there, 0.0).to(WIDE)
        sin = tl.load(sin_at + (row % T) * HALF + i, there, 0.0).to(WIDE)
        a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(y_at + at, a, there)
    tl.store(y_at + at + HALF, b, there)


@triton.jit
def _backward(  # noqa: PLR0913
    grad_at, x_at, gamma_at, cos_at, sin_at, grad_x_at, parts_at, n, eps,
    T: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROTATES: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    head, i = tl.program_id(1), tl.arange(0, BLOCK_K)[None, :]
    gamma_a = tl.load(gamma_at + head * (2 * HALF) + i, i < HALF, 0.0).to(WIDE)
    gamma_b = tl.load(gamma_at + head * (2 * HALF) + HALF + i, i < HALF, 0.0).to(WIDE)
    sum_a = tl.zeros((BLOCK_N, BLOCK_K), WIDE)
    sum_b = tl.zeros((BLOCK_N, BLOCK_K), WIDE)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        there = (row < n) & (i < HALF)
        at = (row.to(tl.int64) * H + head) * (2 * HALF) + i
        da = tl.load(grad_at + at, there, 0.0).to(WIDE)
        db = tl.load(grad_at + at + HALF, there, 0.0).to(WIDE)
        a = tl.load(x_at + at, there, 0.0).to(WIDE)
        b = tl.load(x_at + at + HALF, there, 0.0).to(WIDE)
        if ROTATES:  # back by the same angle
            cos = tl.load(cos_at + (row % T) * HALF + i, there, 0.0).to(WIDE)
            sin = tl.load(sin_at + (row % T) * HALF + i, there, 0.0).to(WIDE)
            da, db = da * cos + db * sin, db * cos - da * sin
        rrms = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a, b = a * rrms, b * rrms  # of Norm(x) from here on
        sum_a += da * a
        sum_b += db * b
        da, db = da * gamma_a, db * gamma_b
        mean = (tl.sum(da * a + db * b, 1) / (2 * HALF))[:, None]
        tl.store(grad_x_at + at, rrms * (da - a * mean), there)
        tl.store(grad_x_at + at + HALF, rrms * (db - b * mean), there)
    i = tl.arange(0, BLOCK_K)
    part = (tl.program_id(0) * H + head) * (2 * HALF) + i
    tl.store(parts_at + part, tl.sum(sum_a, 0), i < HALF)
    tl.store(parts_at + part + HALF, tl.sum(sum_b, 0), i < HALF)
