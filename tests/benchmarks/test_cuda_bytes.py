"""The byte counter against known answers, and docs/gpu.md against the recorded table."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.byte_count import Count, EagerBytes, add_program
from benchmarks.cuda_bytes import MODELS, STRATEGIES

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / "benchmarks/results/cuda_bytes.json"

# As Inductor writes it, cut to what is read: two kernels, one launched twice, a matrix product and attention.
SOURCE = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
@triton_heuristics.pointwise(inductor_meta={'kernel_name': 'triton_poi_fused_add_0', 'kernel_num_gb': 0.25},)
@triton.jit
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), None)
''', device_str='cuda')


triton_red_fused_mean_1 = async_compile.triton('triton_red_fused_mean_1', '''
@triton_heuristics.reduction(inductor_meta={'kernel_num_gb': 1.5e-05, 'mutated_arg_names': []},)
@triton.jit
def triton_red_fused_mean_1(in_ptr0, out_ptr0, xnumel, r0_numel): pass
''', device_str='cuda')


def call(args):
    with torch.cuda._DeviceGuard(0):
        triton_poi_fused_add_0.run(primals_1, buf0, 1024, stream=stream0)
        extern_kernels.mm(buf0, primals_2, out=buf1)
        triton_poi_fused_add_0.run(buf1, buf2, 1024, stream=stream0)
        buf3 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(buf2, buf2, buf2, None, True)
        triton_red_fused_mean_1.run(buf3, buf4, 1, 1024, stream=stream0)
    return (buf4, )
"""


def test_add_program_counts_bytes_of_each_launch() -> None:
    count = Count()
    add_program(count, "graph 0", SOURCE, calls=3)
    add_program(count, "graph 1", SOURCE, calls=0)  # compiled for another depth, and not called
    expected = {"generated_gb": 3 * (2 * 0.25 + 1.5e-5), "generated_kernels": 9, "products": 6}
    assert count.totals() == pytest.approx({"eager_gb": 0, "eager_kernels": 0, "saved_mib": 0} | expected)
    assert count.products == {"mm": 3, "_scaled_dot_product_cudnn_attention": 3}
    with pytest.raises(ValueError, match="triton_red_fused_mean_1 does not say what it moves"):
        add_program(Count(), "", SOURCE.replace("'kernel_num_gb': 1.5e-05, ", ""), 1)
    with pytest.raises(ValueError, match="triton_red_fused_mean_2 is launched and not defined"):
        add_program(Count(), "", SOURCE.replace("mean_1.run", "mean_2.run"), 1)


def test_eager_bytes_of_the_loss_are_36_per_logit() -> None:
    """bf16 to float32 6, log_softmax 8, the loss's gradient 4, log_softmax's 12, and back to bf16 6."""
    count = Count()
    with EagerBytes(count):
        logits = torch.empty(64, 512, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(2, 32, dtype=torch.long)
        F.cross_entropy(logits.view(2, 32, 512).flatten(0, 1).float(), targets.flatten()).backward()
    per_logit = {name: 1e9 * gigabytes / (64 * 512) for name, gigabytes in count.eager.items()}
    expected = {"aten._to_copy": 12, "aten._log_softmax": 8, "aten._log_softmax_backward_data": 12}
    assert {name: per_logit[name] for name in expected} == pytest.approx(expected)
    # besides the logits: targets, their number, and the loss
    assert sum(per_logit.values()) == pytest.approx(36, abs=4 * 64 * 8 / (64 * 512))


def test_table_of_gpu_page_equals_the_recorded_bytes() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    rows = json.loads(RECORD.read_text())["rows"]
    assert [(row["model"], row["strategy"]) for row in rows] == [(m, s) for m in MODELS for s in STRATEGIES]
    for row in rows:
        figures = f"{row['gigabytes']:.1f} | {row['ratio']:.3f} | {row['modelled_ms']:.1f}"
        model = row["model"].removeprefix("llama-").upper()
        layer = f"{row['layer_gigabytes']:.2f} | {row['layer_saved_mib']:.0f}"
        assert f"| Llama-{model}, `{row['strategy']}` | {figures} | {layer} |" in page
