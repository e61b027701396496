"""To Hugging Face's Llama."""

from typing import Any

import torch

from lightning_sv.interop.fold import fold
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import BranchGroup, DirectScale

# ours, inside a layer -> theirs
_LAYER_KEYS = {
    "attn.qkv.q_proj.weight": "self_attn.q_proj.weight",
    "attn.qkv.k_proj.weight": "self_attn.k_proj.weight",
    "attn.qkv.v_proj.weight": "self_attn.v_proj.weight",
    "attn.o_proj.weight": "self_attn.o_proj.weight",
    "ffn.gate_up.gate_proj.weight": "mlp.gate_proj.weight",
    "ffn.gate_up.up_proj.weight": "mlp.up_proj.weight",
    "ffn.down_proj.weight": "mlp.down_proj.weight",
    "attn.qkv.norm.scale.gamma": "input_layernorm.weight",
    "ffn.gate_up.norm.scale.gamma": "post_attention_layernorm.weight",
}
_KEYS = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.scale.gamma": "model.norm.weight",
    "head.lm_head.weight": "lm_head.weight",
}


def hugging_face_config(config: BackboneConfig, max_positions: int = 4096) -> dict[str, Any]:
    """Return the arguments of transformers.LlamaConfig for these sizes."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.head_width,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _is_llama(model: Backbone) -> bool:
    """Whether every norm owns a plain gamma and no branch has anything but its matrix."""
    groups = [module for module in model.modules() if isinstance(module, BranchGroup)]
    return all(
        isinstance(group.norm.scale, DirectScale)
        and group.scale_out is None
        and all(b.scale_in is None and b.scale_out is None and b.norm_width is None for _, b in group.branches())
        for group in groups
    )


@torch.no_grad()
def to_hugging_face(model: Backbone) -> Any:
    """Return a transformers.LlamaForCausalLM with the same logits.

    `llama` keeps its scale vectors as the norms' weights; every other strategy is folded into the
    matrices first, and the norms' weights are 1.

    Raises:
        ValueError: the strategy normalizes outputs (`dnp`), which Llama has no place for.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = model if _is_llama(model) else fold(model)
    theirs = LlamaForCausalLM(LlamaConfig(**hugging_face_config(model.config)))
    ours = plain.state_dict()
    weights = {}
    keys = dict(_KEYS)
    for i in range(model.config.n_layer):
        keys |= {f"layers.{i}.{a}": f"model.layers.{i}.{b}" for a, b in _LAYER_KEYS.items()}
    for mine, hers in keys.items():
        weights[hers] = ours[mine] if mine in ours else torch.ones(model.config.d_model)
    theirs.to(model.embed.weight.dtype).load_state_dict(weights)
    return theirs
