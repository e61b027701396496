"""Cross-entropy of a linear map whose logits are never all there: chunks of tokens, gradients in the forward pass.

For a chunk of tokens the logits are made, reduced to losses, turned into their own gradient in place and multiplied
with inputs and weight; then the next chunk takes their memory. Three products as ever, none made again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.nn.loss import next_token_loss
from lightning_sv.scale.fold import effective_weight, fold_gradients, product_dtype, scaled_product
from lightning_sv.scale.gram import inverse_rms
from lightning_sv.scale.norm import normalize
from lightning_sv.scale.twice import plain_gradients

#: logits that are there at a time: on a CPU what its cache holds, elsewhere what keeps a GPU busy (256 MB in bf16)
CHUNK = {"cpu": 1 << 19}
CHUNK_ELSEWHERE = 1 << 27
#: tokens over d from which a norm of the logits costs less by the Gram matrix than by going over them
GRAM_FROM = 8


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    gamma_in: Tensor | None = None,
    gamma_out: Tensor | None = None,
    norm_eps: float | None = None,
) -> Tensor:
    """Return the mean cross-entropy of gamma_out * Norm(W (gamma_in * x)) in nats, in float32 or wider.

    Args:
        x: (..., d).
        weight: (vocab_size, d).
        targets: (...) token ids.
        gamma_in: (d,), or None for 1.
        gamma_out: (vocab_size,), or None for 1.
        norm_eps: eps of the norm; None for no norm.
    """
    if norm_eps is not None and targets.numel() >= GRAM_FROM * x.shape[-1]:
        x, norm_eps = x * inverse_rms(x, weight, gamma_in, norm_eps), None
    if torch.compiler.is_compiling():
        return _plain(x, weight, gamma_in, gamma_out, targets, norm_eps)
    out: Tensor = _LinearCrossEntropy.apply(x, weight, targets, gamma_in, gamma_out, norm_eps)
    return out


def _plain(
    x: Tensor,
    weight: Tensor,
    gamma_in: Tensor | None,
    gamma_out: Tensor | None,
    targets: Tensor,
    norm_eps: float | None,
) -> Tensor:
    if norm_eps is None:
        return next_token_loss(scaled_product(x, weight, gamma_in, gamma_out), targets)
    return next_token_loss(normalize(scaled_product(x, weight, gamma_in), norm_eps, gamma_out), targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """`_plain` in chunks; keeps the gradients of x, W and gammas, times the number of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        gamma_in: Tensor | None,
        gamma_out: Tensor | None,
        norm_eps: float | None,
    ) -> Tensor:
        dtype = product_dtype(x, weight)
        ctx.dtype, ctx.norm_eps = dtype, norm_eps
        wanted = any(ctx.needs_input_grad)
        outer = gamma_out if norm_eps is None else None  # what is folded into W
        folded = effective_weight(weight, gamma_in, outer).to(dtype)
        rows, column = x.to(dtype).reshape(-1, x.shape[-1]), targets.reshape(-1, 1)
        # At least d tokens: every chunk goes over the (vocab_size, d) gradient once.
        n = max(CHUNK.get(x.device.type, CHUNK_ELSEWHERE) // len(weight), x.shape[-1] // 1)
        wide = torch.promote_types(dtype, torch.float32)
        nats = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(rows) if wanted else rows
        grad_folded = torch.zeros_like(folded, dtype=wide) if wanted else folded
        norm = None if norm_eps is None else _Norm(norm_eps, gamma_out)
        for row, target, out in zip(rows.split(n), column.split(n), grad_x.split(n), strict=True):
            logits = row @ folded.T
            if norm is not None:
                logits = norm(logits, wanted)
            log_p = F.log_softmax(logits, -1, dtype=wide)
            nats -= log_p.gather(1, target).sum()
            if not wanted:
                continue
            grad = log_p.exp_().scatter_add_(1, target, log_p.new_full((), -1).expand(target.shape)).to(dtype)
            if norm is not None:
                grad = norm.backward(grad)
            torch.mm(grad, folded, out=out)
            if dtype == wide:
                grad_folded.addmm_(grad.T, row)
            else:
                grad_folded += grad.T @ row
        if wanted:
            grad_weight, grad_in, grad_out = fold_gradients(grad_folded.to(weight.dtype), weight, gamma_in, outer)
            grad_out = grad_out if norm is None else norm.grad_gamma
            ctx.save_for_backward(x, weight, targets, gamma_in, gamma_out, grad_x, grad_weight, grad_in, grad_out)
        return nats / len(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, targets, gamma_in, gamma_out, *found = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the plain form
            plain = partial(_plain, targets=targets, norm_eps=ctx.norm_eps)
            with torch.autocast(x.device.type, ctx.dtype, enabled=ctx.dtype != weight.dtype):
                found = plain_gradients(plain, (x, weight, gamma_in, gamma_out), grad)
        else:
            part = grad / targets.numel()
            found = [None if t is None else t * part for t in found]
            found[0] = found[0].to(x.dtype).view_as(x)
        return found[0], found[1], None, found[2], found[3], None


class _Norm:
    """gamma * Norm(z) of one chunk after another, and its gradients; gamma's are summed over the chunks."""

    def __init__(self, eps: float, gamma: Tensor | None):
        self.eps, self.gamma = eps, None if gamma is None else gamma.detach().requires_grad_()
        self.grad_gamma: Tensor | None = None if gamma is None else torch.zeros_like(gamma)

    def __call__(self, z: Tensor, wanted: bool) -> Tensor:
        with torch.set_grad_enabled(wanted):
            self._z = z.requires_grad_(wanted)
            self._y = normalize(z, self.eps, self.gamma)
        return self._y.detach()

    def backward(self, grad: Tensor) -> Tensor:
        if self.gamma is None or self.grad_gamma is None:
            return torch.autograd.grad(self._y, self._z, grad)[0]
        grad_z, grad_gamma = torch.autograd.grad(self._y, (self._z, self.gamma), grad)
        self.grad_gamma += grad_gamma
        return grad_z
