"""Language-modelling loss, also fused with the linear map so that the full logits are never stored.

Per chunk of tokens, the logits are computed, reduced to losses, replaced by their gradient in place and multiplied
with inputs and weight; the next chunk reuses the memory. There are still three products, none recomputed.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.eager import CHUNK_ELEMENTS, inside_torch_func, reference_gradients
from lightning_sv.scale.fold import effective_weight, fold_gradients, product_dtype, scaled_product, without_autocast
from lightning_sv.scale.gram import inverse_rms_of_product
from lightning_sv.scale.norm import inverse_rms, norm_gradients, normalize, upcast
from lightning_sv.scale.shapes import Float, Int

#: Logits per chunk on a GPU: enough to occupy it (256 MB in bf16). On a CPU as many as fit its cache.
CHUNK_ON_GPU = 1 << 27
#: Maximum number of chunks in a compiled graph; more chunks take longer to compile.
MOST_COMPILED = 8
#: Ratio tokens / d from which a norm of the logits is cheaper by the Gram matrix than by reading the logits.
GRAM_FROM = 8


def next_token_loss(logits: Float[Tensor, "*tokens vocab_size"], targets: Int[Tensor, "*tokens"]) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token, in float32 (wider inputs keep their width).

    Args:
        logits: (..., vocab_size), of any float dtype
        targets: (...) token ids, one position ahead of the inputs
    """
    return F.cross_entropy(upcast(logits.flatten(0, -2)), targets.flatten())


def linear_cross_entropy(
    x: Float[Tensor, "*tokens d"],
    weight: Float[Tensor, "vocab_size d"],
    targets: Int[Tensor, "*tokens"],
    gamma_in: Float[Tensor, " d"] | None = None,
    gamma_out: Float[Tensor, " vocab_size"] | None = None,
    norm_eps: float | None = None,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of gamma_out * Norm(W (gamma_in * x)) in nats, in float32 or wider.

    A gamma of None is 1; without `norm_eps` there is no norm.
    """
    if norm_eps is not None and targets.numel() >= GRAM_FROM * x.shape[-1]:
        x, norm_eps = x * inverse_rms_of_product(x, weight, gamma_in, norm_eps), None
    inputs = (x, weight, gamma_in, gamma_out)
    if inside_torch_func():
        return _plain(*inputs, targets=targets, norm_eps=norm_eps)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return _chunks(inputs, targets, norm_eps, wanted=False)[0]
    return _LinearCrossEntropy.apply(targets, norm_eps, *inputs)


def chunk_of(tokens: int, d: int, vocab_size: int, device: str) -> int:
    """Return the tokens per chunk, nearly equal for all; at least d, because each chunk updates W's gradient."""
    logits = 8 * CHUNK_ELEMENTS[device] if device in CHUNK_ELEMENTS else CHUNK_ON_GPU
    n = max(logits // vocab_size, d)
    if torch.compiler.is_compiling():
        n = max(n, -(-tokens // MOST_COMPILED))
    return -(-tokens // -(-tokens // n))


def _plain(*inputs: Any, targets: Tensor, norm_eps: float | None) -> Tensor:
    x, weight, gamma_in, gamma_out = inputs
    if norm_eps is None:
        return next_token_loss(scaled_product(x, weight, gamma_in, gamma_out), targets)
    return next_token_loss(normalize(scaled_product(x, weight, gamma_in), norm_eps, gamma_out), targets)


def _chunks(
    inputs: tuple[Any, ...], targets: Tensor, norm_eps: float | None, *, wanted: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mean, and if wanted the gradients of its sum with respect to x, W, gamma_in and gamma_out."""
    x, weight, gamma_in, gamma_out = inputs
    dtype = product_dtype(x, weight)
    outer = gamma_out if norm_eps is None else None  # folded into W
    folded = effective_weight(weight, gamma_in, outer).to(dtype)
    rows, column = x.to(dtype).reshape(-1, x.shape[-1]), targets.reshape(-1, 1)
    n = chunk_of(len(rows), rows.shape[1], len(weight), x.device.type)
    wide = torch.promote_types(dtype, torch.float32)
    nats = torch.zeros((), dtype=wide, device=x.device)
    grad_rows: list[Tensor] = []
    grad_folded = torch.zeros_like(folded, dtype=wide) if wanted else folded
    norm = None if norm_eps is None else _Norm(norm_eps, gamma_out)
    for row, target in zip(rows.split(n), column.split(n), strict=True):
        logits = row @ folded.T
        if norm is not None:
            logits = norm(logits)
        log_p = F.log_softmax(logits, -1, dtype=wide)
        nats -= log_p.gather(1, target).sum()
        if not wanted:
            continue
        grad = log_p.exp_().scatter_add_(1, target, log_p.new_full((), -1).expand(target.shape)).to(dtype)
        if norm is not None:
            grad = norm.backward(grad)
        grad_rows.append(grad @ folded)
        if dtype == wide:
            grad_folded.addmm_(grad.T, row)
        else:
            grad_folded += grad.T @ row
    if not wanted:
        return nats / len(rows), []
    with without_autocast(x):
        gradients = fold_gradients(grad_folded.to(weight.dtype), weight, gamma_in, outer)
    grad_out = gradients[2] if norm is None else norm.grad_gamma
    return nats / len(rows), [torch.cat(grad_rows).view_as(x), *gradients[:2], grad_out]


class _LinearCrossEntropy(torch.autograd.Function):
    """`_chunks` as one operation, which saves its inputs and their gradients."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, norm_eps: float | None, *inputs: Any) -> Tensor:
        ctx.dtype, ctx.norm_eps = product_dtype(*inputs[:2]), norm_eps
        nats, gradients = _chunks(inputs, targets, norm_eps, wanted=True)
        ctx.save_for_backward(targets, *inputs, *gradients)
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        targets, x, weight, gamma_in, gamma_out, *gradients = ctx.saved_tensors
        inputs = (x, weight, gamma_in, gamma_out)
        if torch.is_grad_enabled():  # create_graph: differentiate the reference
            plain = partial(_plain, targets=targets, norm_eps=ctx.norm_eps)
            with torch.autocast(x.device.type, ctx.dtype, enabled=ctx.dtype != weight.dtype):
                return None, None, *reference_gradients(plain, inputs, grad)
        part = grad / targets.numel()
        return (
            None,
            None,
            *(None if g is None else (g * part).to(t.dtype) for g, t in zip(gradients, inputs, strict=True)),
        )


class _Norm:
    """gamma * Norm(z), chunk by chunk, and its gradients; those of gamma are summed over the chunks."""

    def __init__(self, eps: float, gamma: Tensor | None):
        self.eps, self.gamma = eps, gamma
        self.grad_gamma: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        self._z, self._rrms = z, inverse_rms(z, self.eps)
        y = z * self._rrms
        return (y if self.gamma is None else y.mul_(self.gamma)).to(z.dtype)

    def backward(self, grad: Tensor) -> Tensor:
        grad_z, more = norm_gradients(grad, self._z, self._rrms, self.gamma)
        if more is not None:
            self.grad_gamma = more if self.grad_gamma is None else self.grad_gamma + more
        return grad_z
