"""One training step of a Llama with experts: ours, Hugging Face's Mixtral, litgpt's LLaMAMoE.

    python -m benchmarks.moe_models [--rounds 20] [--precisions fp32 bf16] [--threads 1 2] [--json
    FILE]

A step is forward, loss and backward on the same tokens, eager, because shapes depend on the routing
and a compiler would recompile. bf16 is autocast over float32 parameters. The peers load our
`llama`'s weights, and equal losses are checked before timing; no model adds a router loss. All run
interleaved in one process.
"""

import itertools
import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.interleave import measure, show
from benchmarks.memory import DEVICE
from benchmarks.step import BATCH, SEQ_LEN, VOCAB_SIZE, Candidate, autocast_loss, ours, record
from lightning_sv import Backbone, BackboneConfig
from lightning_sv.runs.provenance import Provenance

CONFIG = BackboneConfig(
    name="bench",
    d_model=256,
    n_layer=4,
    n_head=4,
    vocab_size=VOCAB_SIZE,
    n_expert=16,
    n_expert_active=4,
    n_expert_shared=0,
    d_expert=352,
)
LLAMA = "llama"
STRATEGIES = ("hg+dp+or", "unified")
#: implementations of Hugging Face's experts; batched_mm copies a matrix per token and takes 87
#: times as long as ours
WAYS = ("eager", "grouped_mm")
Loss = Callable[[Tensor, Tensor], Tensor]


def mixtral_weights(model: Backbone) -> dict[str, Tensor]:
    """Return the weights of our `llama` with experts, with the names of MixtralForCausalLM."""
    found = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.head.norm.scale.gamma,
        "lm_head.weight": model.head.lm_head.weight,
    }
    for i, layer in enumerate(model.layers):
        attn = layer.attn
        ffn = layer.ffn
        to = f"model.layers.{i}"
        found |= {
            f"{to}.self_attn.{x}_proj.weight": getattr(attn.qkv, f"{x}_proj").weight for x in "qkv"
        }
        gate_up = torch.cat(
            [ffn.inputs.expert_gate_proj.weight, ffn.inputs.expert_up_proj.weight], 1
        )
        found |= {
            f"{to}.self_attn.o_proj.weight": attn.o_proj.weight,
            f"{to}.mlp.gate.weight": ffn.inputs.router.weight,
            f"{to}.mlp.experts.gate_up_proj": gate_up,
            f"{to}.mlp.experts.down_proj": ffn.expert_down_proj.weight,
            f"{to}.input_layernorm.weight": attn.qkv.norm.scale.gamma,
            f"{to}.post_attention_layernorm.weight": ffn.inputs.norm.scale.gamma,
        }
    return {name: weight.detach().clone() for name, weight in found.items()}


def hugging_face(weights: Mapping[str, Tensor], way: str) -> tuple[nn.Module, Loss]:
    """Return MixtralForCausalLM with PyTorch's attention and one implementation of its experts."""
    c = CONFIG
    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=c.d_model, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            num_key_value_heads=c.n_head, vocab_size=c.vocab_size, num_local_experts=c.n_expert,
            num_experts_per_tok=c.n_expert_active, intermediate_size=c.d_expert, rms_norm_eps=c.norm_eps,
            rope_theta=c.rope_theta, max_position_embeddings=SEQ_LEN, sliding_window=None,
            experts_implementation=way, attn_implementation="sdpa",
        )
    )  # fmt: skip
    model.load_state_dict(dict(weights))

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return model, loss


def litgpt(weights: Mapping[str, Tensor]) -> tuple[nn.Module, Loss]:
    """Return litgpt's GPT with Hugging Face's loss; its own is for padded batches."""
    c = CONFIG
    model = GPT(
        Config(
            name="peer", block_size=SEQ_LEN, n_layer=c.n_layer, n_embd=c.d_model, n_head=c.n_head,
            vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, intermediate_size=c.d_expert,
            moe_intermediate_size=c.d_expert, n_expert=c.n_expert, n_expert_per_token=c.n_expert_active,
            rotary_percentage=1.0, rope_base=round(c.rope_theta), parallel_residual=False, bias=False,
            norm_class_name="RMSNorm", norm_eps=c.norm_eps, mlp_class_name="LLaMAMoE",
        )
    )  # fmt: skip
    state = {
        "lm_head.weight": weights["lm_head.weight"],
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.ln_f.weight": weights["model.norm.weight"],
    }
    for i in range(c.n_layer):
        of = f"model.layers.{i}"
        to = f"transformer.h.{i}"
        state |= {
            f"{to}.norm_1.weight": weights[f"{of}.input_layernorm.weight"],
            f"{to}.norm_2.weight": weights[f"{of}.post_attention_layernorm.weight"],
            f"{to}.attn.qkv.weight": torch.cat(
                [weights[f"{of}.self_attn.{x}_proj.weight"] for x in "qkv"]
            ),
            f"{to}.attn.proj.weight": weights[f"{of}.self_attn.o_proj.weight"],
            f"{to}.mlp.gate.weight": weights[f"{of}.mlp.gate.weight"],
        }
        gate_up = weights[f"{of}.mlp.experts.gate_up_proj"]
        down = weights[f"{of}.mlp.experts.down_proj"]
        for e in range(c.n_expert):
            fc_1, fc_2 = gate_up[e].chunk(2)
            expert = f"{to}.mlp.experts.{e}"
            state |= {
                f"{expert}.fc_1.weight": fc_1,
                f"{expert}.fc_2.weight": fc_2,
                f"{expert}.proj.weight": down[e],
            }
    model.load_state_dict(state)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    return model, loss


def candidates(precision: str) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates, ours first, and why peers are missing."""
    torch.manual_seed(0)
    block = torch.randint(0, VOCAB_SIZE, (BATCH, SEQ_LEN + 1)).to(DEVICE)
    tokens = block[:, :-1].contiguous()
    targets = block[:, 1:].contiguous()
    found: dict[str, tuple[nn.Module, Loss]] = {
        name: ours(CONFIG, name) for name in (LLAMA, *STRATEGIES)
    }
    llama = found[LLAMA][0]
    assert isinstance(llama, Backbone)
    weights = mixtral_weights(llama)
    builders: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {"litgpt": lambda: litgpt(weights)}
    builders |= {f"Hugging Face, {way}": lambda way=way: hugging_face(weights, way) for way in WAYS}  # type: ignore[misc]
    missing: dict[str, str] = {}
    for name, build in builders.items():
        found[name] = build()
    made = {}
    for name, (model, loss) in found.items():
        model.to(DEVICE).train()
        made[name] = Candidate(model, autocast_loss(loss, tokens, targets, precision))
        if name in builders:
            with torch.no_grad():
                expected = found[LLAMA][1](tokens, targets)
                torch.testing.assert_close(
                    loss(tokens, targets),
                    expected,
                    rtol=1e-4,
                    atol=0,
                    msg=f"{name}'s loss is not llama's",
                )
            try:
                made[name].step()
            except (
                RuntimeError,
                ValueError,
                TypeError,
            ) as error:  # some implementations do not support autocast
                missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                del made[name]
    return made, missing


def compare(precision: str, threads: int, rounds: int, console: Console) -> dict[str, Any]:
    """Return times relative to llama, and memory, of every candidate."""
    torch.set_num_threads(threads)
    found, missing = candidates(precision)
    rows = measure({name: one.step for name, one in found.items()}, LLAMA, rounds=rounds, warmup=3)
    show(
        console,
        f"a Llama with experts, {precision}, {threads} thread{'s' * (threads > 1)}",
        rows,
        LLAMA,
    )
    for name, why in missing.items():
        console.print(f"{name} is not measured: {why}", markup=False)
    return record(found, rows, missing, rounds, "benchmarks.moe_models")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console()
    results = {}
    for precision, threads in itertools.product(options.precisions, options.threads):
        results[f"{precision}, {threads} threads"] = compare(
            precision, threads, options.rounds, console
        )
        if options.json:
            machine = {
                "device": Provenance.now().machine,
                "batch": [BATCH, SEQ_LEN],
                "model": vars(CONFIG),
            }
            options.json.write_text(
                json.dumps(results | {"machine": machine}, indent=2, default=vars) + "\n"
            )


if __name__ == "__main__":
    main()
