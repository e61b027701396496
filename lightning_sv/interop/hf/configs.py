"""Configuration of the transformers model of a backbone.

Version 5 of transformers has other keys than version 4, and either fills in its defaults for keys
that it does not know, without an error. So config.json gets both: `arguments` are those of version
5, `names_in_version_4` those of version 4 that differ.
"""

import math
from collections.abc import Mapping
from typing import Any

from lightning_sv.interop.hf.families import Target
from lightning_sv.nn import BackboneConfig


def arguments(
    config: BackboneConfig, to: Target, max_positions: int, eot: int | None = None
) -> dict[str, Any]:
    """Return the arguments of the transformers config class.

    `eot` is the id of the token at the start and end of a text; None omits their defaults too.
    """
    rope = _rope(config)
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "attention_bias": False,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "bos_token_id": eot,
        "pad_token_id": None,
        "eos_token_id": eot,
    }
    if to.output_norms:
        shared["output_norms"] = _widths(config, to.output_norms)
    if config.n_expert:
        shared |= _experts(config)
    if to.family == "Llama":
        shared["mlp_bias"] = False
    if to.family == "Gemma3":
        shared |= {
            "hidden_activation": "silu",
            "query_pre_attn_scalar": config.head_width,
            "layer_types": ["full_attention"] * config.n_layer,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        }
    return shared


def _rope(config: BackboneConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def _experts(config: BackboneConfig) -> dict[str, Any]:
    balance = config.router.balance_coef if config.router.balance == "loss" else 0.0
    return ways_to_load(config) | {
        "qkv_bias": False,
        "num_experts": config.n_expert,
        "num_experts_per_tok": config.n_expert_active,
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": config.ffn_width,
        "norm_topk_prob": config.router.renormalize,
        "router_aux_loss_coef": balance / config.n_expert_active,  # theirs is k when balanced
    }


def ways_to_load(config: BackboneConfig) -> dict[str, str]:
    """Return the loading options for experts of any width, which config.json does not store.

    The default, a grouped product, requires strides of 16 bytes, a width of 8 in float32 and bf16.
    """
    is_aligned = math.gcd(config.expert_width, config.d_model) % 8 == 0
    if is_aligned or not config.n_expert:
        return {}
    return {"experts_implementation": "eager"}


def names_in_version_4(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 that differ from those of a config of transformers 5.

    Without them, version 4 silently uses its defaults.
    """
    rope = written["rope_parameters"]
    full = rope.get("full_attention", rope)
    renamed = {"rope_theta": full["rope_theta"]}
    if full["rope_type"] != "default":
        renamed["rope_scaling"] = full
    if "sliding_attention" in rope:
        renamed["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if "num_local_experts" in written:
        renamed["num_experts"] = written["num_local_experts"]
    return renamed


def _widths(config: BackboneConfig, branches: frozenset[str]) -> Mapping[str, int]:
    """Return name in our modelling code -> channels that are normalized together."""
    widths = {
        "q_proj": config.head_width,
        "k_proj": config.head_width,
        "v_proj": config.head_width,
        "lm_head": config.vocab_size,
    }
    return {name: widths.get(name, config.ffn_width) for name in sorted(branches)}
