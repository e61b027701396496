"""To Hugging Face's Llama, Gemma 3 and Qwen2-MoE."""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.interop.fold import refuse_normalized_outputs
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import BranchGroup, RMSNorm

# ours, inside a layer -> theirs; a norm's key stands for its gamma
_ATTENTION = {
    "attn.qkv.norm": "input_layernorm.weight",
    "attn.qkv.q_proj.weight": "self_attn.q_proj.weight",
    "attn.qkv.k_proj.weight": "self_attn.k_proj.weight",
    "attn.qkv.v_proj.weight": "self_attn.v_proj.weight",
    "attn.o_proj.weight": "self_attn.o_proj.weight",
}
_FFN = {
    "ffn.gate_up.gate_proj.weight": "mlp.gate_proj.weight",
    "ffn.gate_up.up_proj.weight": "mlp.up_proj.weight",
    "ffn.down_proj.weight": "mlp.down_proj.weight",
}
_MOE = {
    "ffn.inputs.norm": "post_attention_layernorm.weight",
    "ffn.inputs.router.weight": "mlp.gate.weight",
    "ffn.inputs.shared_gate_proj.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn.inputs.shared_up_proj.weight": "mlp.shared_expert.up_proj.weight",
    "ffn.inputs.shared_router.weight": "mlp.shared_expert_gate.weight",
    "ffn.shared_down_proj.weight": "mlp.shared_expert.down_proj.weight",
    "ffn.expert_down_proj.weight": "mlp.experts.down_proj",
}
_LLAMA_LAYER = _ATTENTION | _FFN | {"ffn.gate_up.norm": "post_attention_layernorm.weight"}
_GEMMA_LAYER = (
    _ATTENTION
    | _FFN
    | {
        "attn.q_norm": "self_attn.q_norm.weight",
        "attn.k_norm": "self_attn.k_norm.weight",
        "attn_post_norm": "post_attention_layernorm.weight",
        "ffn.gate_up.norm": "pre_feedforward_layernorm.weight",
        "ffn_post_norm": "post_feedforward_layernorm.weight",
    }
)
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm": "model.norm.weight",
    "head.lm_head.weight": "lm_head.weight",
}


def hugging_face_config(config: BackboneConfig, max_positions: int = 4096, eot: int | None = None) -> dict[str, Any]:
    """Return the arguments of the transformers config class for these sizes: Llama, Gemma 3 or Qwen2-MoE.

    Args:
        config: sizes of the backbone.
        max_positions: the longest sequence.
        eot: id of the token at which their `generate` ends; none of their defaults means anything here.

    Raises:
        ValueError: a mixture of these families, which transformers has no class for.
    """
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eot,
    }
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.qk_norm != config.post_norm or (config.n_expert and config.qk_norm):
        raise ValueError(
            "transformers has no model with these norms: set qk_norm and post_norm both or neither, and neither with "
            "n_expert."
        )
    if config.qk_norm:
        return shared | {
            "hidden_activation": "silu",
            "query_pre_attn_scalar": config.head_width,
            "layer_types": ["full_attention"] * config.n_layer,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        }
    if config.n_expert:
        # Their default, a grouped product, wants strides of 16 bytes; in float32 and bf16 that is a width of 8.
        experts = {"experts_implementation": "eager"} if config.expert_width % 8 or config.d_model % 8 else {}
        return (
            shared
            | experts
            | {
                "rope_parameters": rope,
                "qkv_bias": False,
                "num_experts": config.n_expert,
                "num_experts_per_tok": config.n_expert_active,
                "moe_intermediate_size": config.expert_width,
                "shared_expert_intermediate_size": config.ffn_width,
                "norm_topk_prob": config.router.renormalize,
                "router_aux_loss_coef": config.router.balance_coef
                / config.n_expert_active,  # theirs is k when balanced
            }
        )
    return shared | {"rope_parameters": rope, "attention_bias": False, "mlp_bias": False}


@torch.no_grad()
def plain_weights(model: Backbone) -> dict[str, Tensor]:
    """Matrices and norms' gammas, by path, of a model with plain norms that computes the same logits.

    Where norms own all scale vectors (`bp` without `hg`) they stay there; else every branch's
    vectors are folded into its matrix, and the gammas of the norms that feed branches are 1.

    Raises:
        ValueError: a branch normalizes its output (`dnp`), which no plain model has a place for.
    """
    refuse_normalized_outputs(model)
    groups = {path: m for path, m in model.named_modules() if isinstance(m, BranchGroup)}
    branches = [branch for group in groups.values() for _, branch in group.branches()]
    owned = all(b.scale_in is None and b.scale_out is None for b in branches) and not any(
        len(g.scale_out) for g in groups.values()
    )
    out = {name: p.detach() for name, p in model.named_parameters() if name.endswith(".weight")}
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm):
            out[path] = model.embed.weight.new_ones(module.d) if module.scale is None else module.scale()
    if not owned:
        for path, group in groups.items():
            out[f"{path}.norm"] = torch.ones_like(out[f"{path}.norm"])
            out |= {f"{path}.{name}.weight": group.effective_weight(name) for name in group.names}
    return out


@torch.no_grad()
def to_hugging_face(model: Backbone, eot: int | None = None) -> Any:
    """Return a transformers model with the same logits: LlamaForCausalLM, Gemma3ForCausalLM or Qwen2MoeForCausalLM.

    The family follows from the sizes (`qk_norm` and `post_norm`: Gemma 3; `n_expert`: Qwen2-MoE).
    What theirs has beyond ours is set so that it does nothing: Gemma's embedding scale is divided
    out, and the sigmoid before Qwen's shared expert is one half with a down_proj twice as large.

    Args:
        model: with any strategy but `dnp`.
        eot: id of the token at which `generate` ends; the corpus's manifest.json has it.

    Raises:
        ValueError: the strategy normalizes outputs (`dnp`), transformers has no such model, or is not installed.
    """
    config, ours = model.config, plain_weights(model)
    arguments = hugging_face_config(config, eot=eot)
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"to_hugging_face needs transformers ({error}); install it.") from error
    if config.qk_norm:
        theirs: Any = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**arguments))
        layer = _GEMMA_LAYER
        ours = {key: value - 1 if "norm" in key else value for key, value in ours.items()}  # theirs is 1 + w
        # by theirs, which is sqrt(d_model) in float32
        ours["embed.weight"] = ours["embed.weight"] / theirs.model.embed_tokens.embed_scale.item()
    elif config.n_expert:
        theirs = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**arguments))
        layer = _MOE | _ATTENTION
        _complete_experts(config, ours)
    else:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**arguments))
        layer = _LLAMA_LAYER
    weights = {hers: ours[mine] for mine, hers in _OUTSIDE.items()}
    for i in range(config.n_layer):
        weights |= {f"model.layers.{i}.{hers}": ours[f"layers.{i}.{mine}"] for mine, hers in layer.items()}
        if config.n_expert:
            pair = [ours[f"layers.{i}.ffn.inputs.expert_{side}_proj.weight"] for side in ("gate", "up")]
            weights[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat(pair, dim=1)
    theirs.to(model.embed.weight.dtype).load_state_dict(weights)
    return theirs


def _complete_experts(config: BackboneConfig, ours: dict[str, Tensor]) -> None:
    """Give every block the shared expert and its gate that Qwen2-MoE always has."""
    zeros = ours["embed.weight"].new_zeros
    if config.router.balance == "bias":
        raise ValueError("transformers' Qwen2-MoE has no bias on the choice of experts; export models without it.")
    for i in range(config.n_layer):
        path = f"layers.{i}.ffn"
        if not config.n_expert_shared:
            for side in ("gate", "up"):
                ours[f"{path}.inputs.shared_{side}_proj.weight"] = zeros(config.ffn_width, config.d_model)
            ours[f"{path}.shared_down_proj.weight"] = zeros(config.d_model, config.ffn_width)
        if f"{path}.inputs.shared_router.weight" not in ours:
            ours[f"{path}.inputs.shared_router.weight"] = zeros(1, config.d_model)
            ours[f"{path}.shared_down_proj.weight"] = 2 * ours[f"{path}.shared_down_proj.weight"]
