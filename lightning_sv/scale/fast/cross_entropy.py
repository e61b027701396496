"""Language-modelling loss fused with the lm_head, so that the full logits are never stored.

The logits of a batch are (tokens, vocab_size): 8,192 x 50,304 in float32 are 1.6 GB, and autograd
would keep them and their log-softmax. So tokens are taken in chunks. Per chunk of rows x (n, d),
with W' the folded matrix:

    logits = x W'^T        (n, vocab_size)
    loss  += -log softmax(logits)[target]
    g      = softmax(logits) - onehot(target)     in place of the logits
    dx     = g W',  dW' += g^T x

and the next chunk reuses the memory. These are the three products of a linear map, none recomputed:
gradients are computed in the forward pass, and backward multiplies them by the gradient of the
loss.

A norm of the logits (`dnp`) is applied per chunk, or for many tokens taken from the Gram matrix
(fast/gram.py).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.definitions import effective_weight, next_token_loss, product_dtype
from lightning_sv.scale.fast.eager import (
    CHUNK_ELEMENTS,
    definition_gradients,
    inside_torch_func,
    without_autocast,
)
from lightning_sv.scale.fast.fold import fold_gradients, scaled_product
from lightning_sv.scale.fast.gram import inverse_rms_of_product
from lightning_sv.scale.fast.norm import inverse_rms, norm_gradients, normalize
from lightning_sv.scale.shapes import Float, Int

#: Logits per chunk on a GPU: enough to occupy it (256 MB in bf16). On a CPU as many as fit its
#: cache.
CHUNK_ON_GPU = 1 << 27
#: Maximum number of chunks in a compiled graph; more chunks take longer to compile.
MOST_COMPILED = 8
#: Ratio tokens / d from which a norm of the logits is taken from the Gram matrix instead of reading
#: the logits: cheaper on a CPU, and 1.5 GB less on a GPU, where compiled code keeps the float32
#: logits of several chunks at once (benchmarks/TRIED.md).
GRAM_FROM = 8
GRAM_FROM_ON_GPU = 4

#: x, W, gamma_in, gamma_out
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def linear_cross_entropy(
    x: Float[Tensor, "*tokens d"],
    weight: Float[Tensor, "vocab_size d"],
    targets: Int[Tensor, "*tokens"],
    gamma_in: Float[Tensor, " d"] | None = None,
    gamma_out: Float[Tensor, " vocab_size"] | None = None,
    norm_eps: float | None = None,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of gamma_out * Norm(W (gamma_in * x)) in nats, in float32.

    A gamma of None is 1. Without `norm_eps` there is no norm. Every target is a token id; ignored
    targets, such as -100, are not supported.
    """
    gram_from = GRAM_FROM if x.device.type in CHUNK_ELEMENTS else GRAM_FROM_ON_GPU
    if norm_eps is not None and targets.numel() >= gram_from * x.shape[-1]:
        x = x * inverse_rms_of_product(x, weight, gamma_in, norm_eps)
        norm_eps = None

    inputs = (x, weight, gamma_in, gamma_out)
    if inside_torch_func():
        return loss_of_logits(inputs, targets, norm_eps)
    is_trained = any(t.requires_grad for t in inputs if t is not None)
    if is_trained and torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(targets, norm_eps, *inputs)
    return chunked_loss(inputs, targets, norm_eps)


def loss_of_logits(inputs: Inputs, targets: Tensor, norm_eps: float | None) -> Tensor:
    """Return the same loss from all logits at once: the definition."""
    x, weight, gamma_in, gamma_out = inputs
    if norm_eps is None:
        return next_token_loss(scaled_product(x, weight, gamma_in, gamma_out), targets)
    logits = normalize(scaled_product(x, weight, gamma_in), norm_eps, gamma_out)
    return next_token_loss(logits, targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss as one operation, which saves its inputs and their gradients."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, norm_eps: float | None, *inputs: Any) -> Tensor:
        x, weight, _, _ = inputs
        ctx.dtype = product_dtype(x, weight)
        ctx.norm_eps = norm_eps
        nats, gradients = chunked_loss_and_gradients(inputs, targets, norm_eps)
        ctx.save_for_backward(targets, *inputs, *gradients)
        return nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        targets, x, weight, gamma_in, gamma_out, *gradients = ctx.saved_tensors
        inputs = (x, weight, gamma_in, gamma_out)
        if torch.is_grad_enabled():

            def definition(*inputs: Any) -> Tensor:
                return loss_of_logits(inputs, targets, ctx.norm_eps)

            with torch.autocast(x.device.type, ctx.dtype, enabled=ctx.dtype != weight.dtype):
                return None, None, *definition_gradients(definition, inputs, grad)

        per_token = grad / targets.numel()
        scaled = [
            None if g is None else (g * per_token).to(t.dtype)
            for g, t in zip(gradients, inputs, strict=True)
        ]
        return None, None, *scaled


def chunked_loss(inputs: Inputs, targets: Tensor, norm_eps: float | None) -> Tensor:
    """Return the mean loss."""
    lm_head = _ChunkedLogits(inputs, norm_eps)
    nats = lm_head.zero_loss()
    for rows, target in lm_head.chunks(targets):
        nats -= lm_head.log_likelihood(rows, target)
    return nats / targets.numel()


def chunked_loss_and_gradients(
    inputs: Inputs, targets: Tensor, norm_eps: float | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mean loss, and the gradients of its sum by x, W, gamma_in and gamma_out."""
    lm_head = _ChunkedLogits(inputs, norm_eps)
    nats = lm_head.zero_loss()
    for rows, target in lm_head.chunks(targets):
        nats -= lm_head.log_likelihood_and_backward(rows, target)
    return nats / targets.numel(), lm_head.gradients()


def chunk_size(tokens: int, d: int, vocab_size: int, device: str) -> int:
    """Return the tokens per chunk, nearly equal for all.

    At least d, because each chunk updates W's gradient.
    """
    logits = 8 * CHUNK_ELEMENTS[device] if device in CHUNK_ELEMENTS else CHUNK_ON_GPU
    most = max(logits // vocab_size, d)
    if torch.compiler.is_compiling():
        most = max(most, -(-tokens // MOST_COMPILED))
    n_chunks = -(-tokens // most)
    return -(-tokens // n_chunks)


class _Normalized(NamedTuple):
    """The norm of a chunk: its input (n, vocab_size), and 1 / rms of each row (n, 1)."""

    product: Tensor
    inverse_rms: Tensor

    def times(self, gamma: Tensor | None) -> Tensor:
        """Return gamma * Norm(product)."""
        y = self.product * self.inverse_rms
        if gamma is not None:
            y = y.mul_(gamma)
        return y.to(self.product.dtype)


class _ChunkedLogits:
    """The linear map to logits, chunk by chunk, and its gradients, summed over the chunks."""

    def __init__(self, inputs: Inputs, norm_eps: float | None):
        self.x, self.weight, self.gamma_in, gamma_out = inputs
        self.dtype = product_dtype(self.x, self.weight)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.norm_eps = norm_eps
        # a norm comes before gamma_out, which then is not folded into W
        has_norm = norm_eps is not None
        self.gamma_folded = None if has_norm else gamma_out
        self.gamma_of_norm = gamma_out if has_norm else None
        self.folded = effective_weight(self.weight, self.gamma_in, self.gamma_folded).to(self.dtype)
        self.grad_rows: list[Tensor] = []
        self.grad_folded: Tensor | None = None
        self.grad_gamma: Tensor | None = None  # of the norm

    def zero_loss(self) -> Tensor:
        return torch.zeros((), dtype=self.wide, device=self.x.device)

    def chunks(self, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows (n, d) of x and their targets (n, 1)."""
        rows = self.x.to(self.dtype).reshape(-1, self.x.shape[-1])
        column = targets.reshape(-1, 1)
        n = chunk_size(len(rows), rows.shape[1], len(self.weight), self.x.device.type)
        return zip(rows.split(n), column.split(n), strict=True)

    def log_likelihood(self, rows: Tensor, target: Tensor) -> Tensor:
        """Return the sum of log p(target) of a chunk."""
        log_p, _ = self._log_probabilities(rows)
        return log_p.gather(1, target).sum()

    def log_likelihood_and_backward(self, rows: Tensor, target: Tensor) -> Tensor:
        """Return the sum of log p(target) of a chunk, and add its gradients."""
        log_p, normalized = self._log_probabilities(rows)
        log_likelihood = log_p.gather(1, target).sum()
        minus_one = log_p.new_full((), -1).expand(target.shape)
        grad = log_p.exp_().scatter_add_(1, target, minus_one)  # softmax - onehot
        grad = grad.to(self.dtype)
        if normalized is not None:
            grad = self._norm_backward(grad, normalized)
        self._product_backward(grad, rows)
        return log_likelihood

    def _log_probabilities(self, rows: Tensor) -> tuple[Tensor, _Normalized | None]:
        """Return log p (n, vocab_size) of rows (n, d), and what the norm's gradient needs.

        The logits are local here and in the callers, so that they are freed before those of the
        next chunk.
        """
        logits = rows @ self.folded.T  # (n, vocab_size)
        normalized = None
        if self.norm_eps is not None:
            normalized = _Normalized(logits, inverse_rms(logits, self.norm_eps))
            logits = normalized.times(self.gamma_of_norm)
        return F.log_softmax(logits, -1, dtype=self.wide), normalized

    def _norm_backward(self, grad: Tensor, normalized: _Normalized) -> Tensor:
        """Return the gradient before the norm, (n, vocab_size), and add that of its gamma."""
        grad, grad_gamma = norm_gradients(
            grad, normalized.product, normalized.inverse_rms, self.gamma_of_norm
        )
        if self.grad_gamma is not None and grad_gamma is not None:
            grad_gamma = self.grad_gamma + grad_gamma
        self.grad_gamma = grad_gamma
        return grad

    def _product_backward(self, grad: Tensor, rows: Tensor) -> None:
        """Add the gradients of the product of a chunk, whose gradient is (n, vocab_size)."""
        self.grad_rows.append(grad @ self.folded)
        if self.grad_folded is None:
            self.grad_folded = torch.zeros_like(self.folded, dtype=self.wide)
        if self.dtype == self.wide:
            self.grad_folded.addmm_(grad.T, rows)
        else:
            self.grad_folded += grad.T @ rows

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of x, W, gamma_in and gamma_out."""
        assert self.grad_folded is not None
        grad_folded = self.grad_folded.to(self.weight.dtype)
        with without_autocast(self.x):
            grad_weight, grad_in, grad_out = fold_gradients(
                grad_folded, self.weight, self.gamma_in, self.gamma_folded
            )
        if self.norm_eps is not None:
            grad_out = self.grad_gamma
        grad_x = torch.cat(self.grad_rows).view_as(self.x)
        return [grad_x, grad_weight, grad_in, grad_out]
