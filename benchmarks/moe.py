"""One training step of a mixture-of-experts block: ours against litgpt's and Hugging Face's.

    python -m benchmarks.moe [--rounds 40] [--precisions fp32 bf16] [--json FILE]

A step is forward and backward on new tokens, as in training, so the routing changes every step. The peers
are litgpt's LLaMAMoE and the experts of Hugging Face's Qwen2MoeSparseMoeBlock, eager and with grouped products
(without its shared expert), each behind a norm, like ours. All have the same
parameters, route each token to the same experts and weight them by the softmax over the selected logits (checked
before timing). bf16 is autocast over float32 parameters, for all. All run interleaved in one process.
"""

import itertools
import json
import platform
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import LLaMAMoE
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeTopKRouter

from benchmarks.interleave import measure, show
from benchmarks.memory import DEVICE, peak_mib
from lightning_sv.nn import BackboneConfig, MixtureOfExperts
from lightning_sv.scale import ScaleBuilder, ScaledLinear, ScaleStrategy

N_BATCHES = 24
OURS, LITGPT = "ours", "litgpt"
#: name -> implementation of its experts; batched_mm, which copies a matrix per token, takes 87 times as long as ours
HUGGING_FACE = {f"Hugging Face, {way}": way for way in ("eager", "grouped_mm")}
STRATEGIES = ("hg", "hg+dp+or", "unified")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one block and its batch."""

    d_model: int = 128
    d_expert: int = 88
    n_expert: int = 32
    n_active: int = 4
    batch: int = 8
    seq_len: int = 256


SIZES = {"narrow": Sizes(), "wide": Sizes(d_model=256, d_expert=352)}


def block_of(sizes: Sizes, scale: str = "nop") -> MixtureOfExperts:
    """Our module, including norm, router and statistics, without a shared expert."""
    torch.manual_seed(0)
    config = BackboneConfig(
        d_model=sizes.d_model,
        n_layer=1,
        n_head=1,
        n_expert=sizes.n_expert,
        n_expert_active=sizes.n_active,
        n_expert_shared=0,
        d_expert=sizes.d_expert,
    )
    block = MixtureOfExperts(config, ScaleBuilder(ScaleStrategy.parse(scale)))
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, ScaledLinear):
                module.weight.normal_(std=module.d_in**-0.5)
    return block


class Ours(nn.Module):
    """Output of our module without its routing."""

    def __init__(self, sizes: Sizes, scale: str = "nop"):
        super().__init__()
        self.block = block_of(sizes, scale)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        return self.block(x)[0]


class Normed(nn.Module):
    """A peer's block behind a norm like ours."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        return self.block(F.rms_norm(x, x.shape[-1:], eps=1e-5))


class HuggingFace(nn.Module):
    """Router and experts of a Qwen2MoeSparseMoeBlock, called in the same way."""

    def __init__(self, ours: MixtureOfExperts, sizes: Sizes, way: str):
        super().__init__()
        config = Qwen2MoeConfig(
            hidden_size=sizes.d_model,
            moe_intermediate_size=sizes.d_expert,
            num_experts=sizes.n_expert,
            num_experts_per_tok=sizes.n_active,
            norm_topk_prob=True,
            experts_implementation=way,
        )
        self.gate, self.experts = Qwen2MoeTopKRouter(config), Qwen2MoeExperts(config)
        gate, up = ours.inputs.expert_gate_proj.weight, ours.inputs.expert_up_proj.weight
        self.gate.weight.data.copy_(ours.inputs.router.weight)
        self.experts.gate_up_proj.data.copy_(torch.cat([gate, up], 1))
        self.experts.down_proj.data.copy_(ours.expert_down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_model) -> (B, T, d_model)."""
        tokens = x.flatten(0, -2)
        _, weights, experts = self.gate(tokens)
        return self.experts(tokens, experts, weights).view(x.shape)


def litgpt(ours: MixtureOfExperts, sizes: Sizes) -> nn.Module:
    config = Config(
        n_embd=sizes.d_model,
        n_head=1,
        moe_intermediate_size=sizes.d_expert,
        intermediate_size=sizes.d_expert,
        n_expert=sizes.n_expert,
        n_expert_per_token=sizes.n_active,
        mlp_class_name="LLaMAMoE",
        bias=False,
    )
    block = LLaMAMoE(config)
    block.gate.weight.data.copy_(ours.inputs.router.weight)
    for e, expert in enumerate(block.experts):
        expert.fc_1.weight.data.copy_(ours.inputs.expert_gate_proj.weight[e])
        expert.fc_2.weight.data.copy_(ours.inputs.expert_up_proj.weight[e])
        expert.proj.weight.data.copy_(ours.expert_down_proj.weight[e])
    return block


def blocks(sizes: Sizes) -> dict[str, nn.Module]:
    ours = Ours(sizes)
    peers = {LITGPT: litgpt(ours.block, sizes)}
    peers |= {name: HuggingFace(ours.block, sizes, way) for name, way in HUGGING_FACE.items()}
    found = {OURS: ours} | {name: Normed(peer) for name, peer in peers.items()}
    x = torch.randn(2, 64, sizes.d_model)
    for block in found.values():
        torch.testing.assert_close(block(x), ours(x), atol=1e-4, rtol=1e-4)
    return found | {f"ours, {scale}": Ours(sizes, scale) for scale in STRATEGIES}


def step_of(block: nn.Module, sizes: Sizes, precision: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(1)  # equal tokens for the n-th step of every candidate
    shape = (N_BATCHES, sizes.batch, sizes.seq_len, sizes.d_model)
    batches = itertools.cycle(torch.randn(shape, generator=generator).to(DEVICE))

    def step() -> None:
        x = next(batches).detach().requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            y = block(x)
        y.backward(torch.ones_like(y))
        for parameter in block.parameters():
            parameter.grad = None
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    console, results = Console(), {}
    for size, precision in itertools.product(options.sizes, options.precisions):
        found = {name: block.to(DEVICE) for name, block in blocks(SIZES[size]).items()}
        steps = {name: step_of(block, SIZES[size], precision) for name, block in found.items()}
        # More warm-up than elsewhere, because bf16 kernels are compiled per shape, and shapes vary with the routing.
        peers, missing = {}, {}
        for name in (LITGPT, *HUGGING_FACE):
            try:
                steps[name]()
                peers[name] = steps[name]
            except (RuntimeError, ValueError, TypeError) as error:  # some implementations do not support autocast
                missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        own = {name: step for name, step in steps.items() if name.startswith(OURS)}
        times = measure(peers | {OURS: steps[OURS]}, OURS, rounds=options.rounds, warmup=8)
        cost = measure(own, OURS, rounds=options.rounds, warmup=8)
        peaks = {name: peak_mib(step) for name, step in (own | peers).items()}
        show(console, f"{size}, {precision}: a mixture-of-experts block", times, OURS)
        for name, why in missing.items():
            console.print(f"{name} is not measured: {why}", markup=False)
        show(console, f"{size}, {precision}: what scale vectors cost it", cost, OURS)
        console.print("peak memory of a step: " + ", ".join(f"{name} {mib:.1f} MiB" for name, mib in peaks.items()))
        results[f"{size} {precision}"] = {
            "peers": [vars(r) for r in times],
            "missing": missing,
            "strategies": [vars(r) for r in cost],
            "peak_mib": peaks,
        }
    results["machine"] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "sizes": {size: vars(SIZES[size]) for size in options.sizes},
    }
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
