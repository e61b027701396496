"""Kernels of attention: the fused one that a GPU runs, and masks of documents.

`auto` takes the first of `FASTEST_FIRST` that supports the case. Flash is reported to be faster
than cuDNN on a GH200 (pytorch issue 187770), so it is a setting. A CPU has its own kernels.

The mask of packed documents is (B, 1, T, T) in eager code. Compiled code on a GPU uses
flex_attention, whose mask is a function of two positions and a table of the blocks to visit:

    documents        0 0 1 1 | 1 1 2 2        two blocks of four positions
    query block 0    keys of block 0, masked
    query block 1    keys of block 0, masked (document 1), and of block 1, masked
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_sv.errors import ConfigError
from lightning_sv.scale.shapes import Bool, Float, Int

if TYPE_CHECKING:  # flex_attention imports torch's compiler, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]
#: with backward, on an H100 (results/gpu): cuDNN 1.12 ms, flash 1.81, efficient 4.37
FASTEST_FIRST = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
#: positions per block of flex_attention's mask, its default
MASK_BLOCK = 128


def attend(
    q: Float[Tensor, "B H T d_head"],
    k: Float[Tensor, "B G T d_head"],
    v: Float[Tensor, "B G T d_head"],
    mask: "Tensor | BlockMask | None",
    backend: AttentionBackend,
) -> Float[Tensor, "B H T d_head"]:
    """Return softmax(q k^T / sqrt(d_head)) v; a mask of None is causal.

    H / G queries share a key if they differ.
    """
    is_grouped = bool(q.shape[1] != k.shape[1])  # sizes are tensors in a trace of torch.jit
    if mask is not None and not isinstance(mask, Tensor):
        if torch.compiler.is_compiling():
            return _flex_attention(q, k, v, mask, is_grouped)
        mask = _as_tensor(mask)
        backend = "auto"  # the kernel of the setting need not support a tensor
    with _chosen(backend, q.device):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask", is_grouped: bool) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=is_grouped)
    return out


def _as_tensor(mask: "BlockMask") -> Tensor:
    """Return the mask (B, 1, T, T): eager flex_attention would store the scores of all heads."""
    from torch.nn.attention.flex_attention import create_mask

    n_batch = mask.kv_num_blocks.shape[0]
    device = mask.kv_num_blocks.device
    return create_mask(mask.mask_mod, n_batch, None, *mask.seq_lengths, device=device)


def _chosen(backend: AttentionBackend, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch tries the kernels of a setting in order.

    Eager code leaves out kernels that the caller has disabled: second derivatives need `math`. If
    the caller has disabled all of them, its own choice holds.
    """
    if backend == "auto" and device.type != "cuda":
        return nullcontext()
    kernels = kernels_of(backend)
    if not torch.compiler.is_compiling():
        kernels = [kernel for kernel in kernels if _is_enabled(kernel)]
    if not kernels:
        return nullcontext()
    return sdpa_kernel(kernels, set_priority=True)


def kernels_of(backend: AttentionBackend) -> list[SDPBackend]:
    """Return the kernels of a setting in the order in which they are tried.

    The backward pass of cuDNN is not deterministic.
    """
    if backend != "auto":
        return [FASTEST_FIRST[backend]]
    kernels = list(FASTEST_FIRST.values())
    if torch.are_deterministic_algorithms_enabled():
        kernels.remove(SDPBackend.CUDNN_ATTENTION)
    return kernels


def _is_enabled(kernel: SDPBackend) -> bool:
    enabled = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    return enabled[kernel]()


def check_backend(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    d_head: int,
    *,
    masked: bool,
) -> None:
    """Check by a small call that the device has a kernel.

    Args:
        backend: the setting
        device: device of the training
        dtype: dtype of queries, keys and values
        d_head: width of a head
        masked: if True, with a mask of documents as a tensor

    Raises:
        ConfigError: the device has no such kernel for this dtype, width or mask
    """
    if backend == "auto":
        return
    q = torch.zeros(1, 1, MASK_BLOCK, d_head, dtype=dtype, device=device, requires_grad=True)
    mask = document_mask(torch.zeros(1, MASK_BLOCK, device=device)) if masked else None
    try:
        attend(q, q, q, mask, backend).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        case = f"{dtype} with head width {d_head} and {'a' if masked else 'no'} mask of documents"
        expected = f"auto, or a kernel that {device.type} has for {case}"
        raise ConfigError(f"model.attention_backend is {backend}; expected {expected}.") from error


def document_mask(documents: Int[Tensor, "B T"]) -> Bool[Tensor, "B 1 T T"]:
    """Return True where a query may see a key: its own position or earlier, in its document."""
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)  # B T T
    return same.tril().unsqueeze(1)


def document_block_mask(documents: Int[Tensor, "B T"]) -> "BlockMask":
    """Return `document_mask` for flex_attention, without a (T, T) tensor.

    Documents are numbered in order, so that the first and the last one of a block decide whether
    it shares a document with an earlier block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = documents.device
    seq_len = documents.shape[1]

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    first = documents[:, ::MASK_BLOCK]  # B block
    ends = torch.arange(MASK_BLOCK - 1, seq_len + MASK_BLOCK - 1, MASK_BLOCK, device=device)
    last = documents[:, ends.clamp(max=seq_len - 1)]  # B block
    first_of_query = first.unsqueeze(-1)  # B query-block 1
    last_of_query = last.unsqueeze(-1)
    first_of_key = first.unsqueeze(-2)  # B 1 key-block
    last_of_key = last.unsqueeze(-2)

    n_blocks = first.shape[1]
    is_causal = torch.ones(n_blocks, n_blocks, dtype=torch.bool, device=device).tril()
    shares_document = last_of_key >= first_of_query  # B query-block key-block
    visited = is_causal & shares_document
    # An earlier block that has a single document, that of all queries, needs no mask.
    is_one_document = first_of_key == last_of_query
    unmasked = visited & is_one_document & is_causal.tril(-1)
    masked = visited & ~unmasked
    return BlockMask.from_kv_blocks(
        *_indices(masked.unsqueeze(1)),
        *_indices(unmasked.unsqueeze(1)),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=may_see,
        seq_lengths=(seq_len, seq_len),
    )


def _indices(
    blocks: Bool[Tensor, "B 1 n n"],
) -> tuple[Int[Tensor, "B 1 n"], Int[Tensor, "B 1 n n"]]:
    """Return the number of blocks in each row, and their indices first."""
    count = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return count, indices.int()
