"""Kernels of attention: the setting, what a device lacks, and the two masks of documents."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_sv.curvature import HessianProduct
from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone, BackboneConfig, document_ids
from lightning_sv.nn.attention_kernels import (
    AttentionBackend,
    attend,
    check_backend,
    document_block_mask,
    document_mask,
    kernels_of,
)
from tests.conftest import Refused

CPU = torch.device("cpu")


def packed(seq_len: int) -> Tensor:
    """Return the documents of three sequences: one, two, and many."""
    tokens = torch.randint(0, 60, (3, seq_len))
    tokens[:2] = 1
    tokens[1, seq_len // 2] = 0
    return document_ids(tokens, eot=0)


def visited(mask: BlockMask) -> list[list[set[int]]]:
    """Return the key blocks that each query block visits."""
    counts = mask.kv_num_blocks[:, 0] + mask.full_kv_num_blocks[:, 0]
    rows = []
    for b, row in enumerate(counts):
        partial = mask.kv_num_blocks[b, 0]
        whole = mask.full_kv_num_blocks[b, 0]
        pairs = zip(mask.kv_indices[b, 0], mask.full_kv_indices[b, 0], strict=True)
        rows.append(
            [{*p[: partial[i]].tolist(), *w[: whole[i]].tolist()} for i, (p, w) in enumerate(pairs)]
        )
        assert [len(blocks) for blocks in rows[-1]] == row.tolist()
    return rows


@pytest.mark.parametrize("seq_len", [64, 128, 300, 512])
def test_block_mask_of_documents_is_the_tensor_mask(seq_len: int) -> None:
    documents = packed(seq_len)
    mask = document_block_mask(documents)
    expected = create_block_mask(mask.mask_mod, 3, None, seq_len, seq_len, device="cpu")
    assert visited(mask) == visited(expected)
    if seq_len % 128 == 0:
        assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)

    q, k, v = (torch.randn(3, heads, seq_len, 16, dtype=torch.float64) for heads in (4, 2, 2))
    plain = attend(q, k, v, document_mask(documents), "auto")
    assert torch.equal(attend(q, k, v, mask, "auto"), plain)  # eager


@pytest.mark.slow
def test_compiled_block_mask_equals_the_tensor_mask_without_compiling_again() -> None:
    """Without gradients, because flex_attention has none on a CPU.

    Without Inductor, whose C++ for flex_attention does not compile on a CPU without AVX2 (torch
    2.13).
    """
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, dynamic=False, fullgraph=True, backend=counter)
    q, k, v = (torch.randn(3, heads, 256, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        for _ in range(2):
            documents = packed(256)
            plain = attend(q, k, v, document_mask(documents), "auto")
            torch.testing.assert_close(
                compiled(q, k, v, document_block_mask(documents), "auto"), plain
            )
    assert counter.frame_count == 1


def test_auto_prefers_cudnn_and_leaves_it_out_of_deterministic_runs() -> None:
    assert kernels_of("auto")[0] is SDPBackend.CUDNN_ATTENTION
    assert kernels_of("math") == [SDPBackend.MATH]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels_of("auto")[0] is SDPBackend.FLASH_ATTENTION
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("backend", "on_cpu"), [
    ("auto", True), ("flash", True), ("math", True), ("cudnn", False), ("efficient", False),
])  # fmt: skip
def test_backend_that_the_device_lacks_is_refused(backend: str, on_cpu: bool) -> None:
    if on_cpu:
        check_backend(backend, CPU, torch.float32, 16, masked=False)
        return
    with pytest.raises(ConfigError, match="model.attention_backend"):
        check_backend(backend, CPU, torch.float32, 16, masked=False)


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_model_runs_the_kernel_of_the_setting(mode: str, config: BackboneConfig) -> None:
    model = Backbone(config).double()
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    plain = model(tokens)
    model.set_attention_backend("math")
    if mode == "compiled":
        model.compile(fullgraph=True, backend="aot_eager")
    with torch.profiler.profile() as profiler:
        torch.testing.assert_close(model(tokens), plain, rtol=1e-9, atol=1e-12)
    names = {event.name for event in profiler.events()}
    assert not any("flash" in name for name in names)
    if mode == "eager":  # the caller's own choice comes first
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.profiler.profile() as profiler:
            model(tokens)
        assert any("flash" in event.name for event in profiler.events())


@pytest.mark.parametrize("backend", ["auto", "flash", "math"])
def test_second_derivatives_with_any_kernel(backend: AttentionBackend) -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)

    def attended(backend: AttentionBackend) -> Callable[[], Tensor]:
        return lambda: attend(q, q, q, None, backend).square().sum()

    vector = [torch.randn_like(q)]
    (plain,) = HessianProduct(attended("math"), [q])(vector)
    (product,) = HessianProduct(attended(backend), [q])(vector)
    assert torch.equal(product, plain)


def test_fit_with_a_kernel_that_the_device_lacks_is_refused(
    refused: Refused, run_args: list[str]
) -> None:
    assert "model.attention_backend" in refused(
        "fit", *run_args, "--model.attention_backend", "cudnn"
    )
