"""Kernels of attention and masks of documents, compared with the plain path in float64."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.process import Task
from lightning_sv.nn import document_ids
from lightning_sv.nn.attention_kernels import (
    FASTEST_FIRST,
    AttentionBackend,
    attend,
    document_block_mask,
    document_mask,
)

#: batch, heads, heads of keys, length, width of a head
SHAPE = (2, 4, 2, 512, 64)
TOY_SHAPE = (2, 4, 2, 160, 16)


def run(task: Task) -> dict[str, Any]:
    """Return the relative errors in bf16 of each kernel and of the block mask, and of gradients."""
    device = torch.device(task.device)
    batch, heads, key_heads, seq_len, width = TOY_SHAPE if task.toy else SHAPE
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, n, seq_len, width, generator=generator, dtype=torch.float64)
        .bfloat16()
        .to(device)
        for n in (heads, key_heads, key_heads)
    )
    inputs = (q, k, v)
    tokens = torch.randint(0, 100, (batch, seq_len), generator=generator).to(device)
    documents = document_ids(tokens, eot=0)

    found: dict[str, Any] = {"kernels": {}, "documents": {}}
    plain = results(inputs, None, "math", wide=True)
    for name in FASTEST_FIRST:
        found["kernels"][name] = compared(inputs, None, name, plain)  # type: ignore[arg-type]
        task.save(found)
    dense = document_mask(documents)
    plain = results(inputs, dense, "math", wide=True)
    found["documents"]["tensor"] = compared(inputs, dense, "auto", plain)
    blocks = document_block_mask(documents)
    found["documents"]["block mask"] = compared(
        inputs, blocks, "auto", plain, compiled=not task.toy
    )
    return found


def results(
    inputs: tuple[Tensor, ...],
    mask: Any,
    backend: AttentionBackend,
    *,
    wide: bool = False,
    compiled: bool = False,
) -> list[Tensor]:
    """Return the output and the gradients of its sum of squares."""
    leaves = [(t.double() if wide else t).detach().requires_grad_() for t in inputs]
    call = torch.compile(attend, dynamic=False, fullgraph=True) if compiled else attend
    out = call(*leaves, mask, backend)
    gradients = torch.autograd.grad(out.double().square().sum(), leaves)
    return [out.detach(), *gradients]


def compared(
    inputs: tuple[Tensor, ...],
    mask: Any,
    backend: AttentionBackend,
    plain: list[Tensor],
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Return the largest relative error of output and gradients, or why there is none."""
    try:
        values = results(inputs, mask, backend, compiled=compiled)
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())[:200]}
    pairs = zip(values, plain, strict=True)
    return {"error_of_norm": max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)}
