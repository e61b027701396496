"""Conversion of a backbone to a transformers model with the same logits."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.interop.fold import Folded, fold_weights
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.roles.fake import transformers

# ours, inside a layer -> theirs; a norm's key stands for its gamma
_ATTENTION = {
    "attn.qkv.norm": "input_layernorm.weight",
    "attn.qkv.q_proj.weight": "self_attn.q_proj.weight",
    "attn.qkv.k_proj.weight": "self_attn.k_proj.weight",
    "attn.qkv.v_proj.weight": "self_attn.v_proj.weight",
    "attn.o_proj.weight": "self_attn.o_proj.weight",
}
_QK_NORM = {"attn.q_norm": "self_attn.q_norm.weight", "attn.k_norm": "self_attn.k_norm.weight"}
_FFN = {
    "ffn.gate_up.gate_proj.weight": "mlp.gate_proj.weight",
    "ffn.gate_up.up_proj.weight": "mlp.up_proj.weight",
    "ffn.down_proj.weight": "mlp.down_proj.weight",
}
_SHARED_EXPERT = {
    "ffn.inputs.shared_gate_proj.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn.inputs.shared_up_proj.weight": "mlp.shared_expert.up_proj.weight",
    "ffn.inputs.shared_router.weight": "mlp.shared_expert_gate.weight",
    "ffn.shared_down_proj.weight": "mlp.shared_expert.down_proj.weight",
}
_EXPERTS = {
    "ffn.inputs.norm": "post_attention_layernorm.weight",
    "ffn.inputs.router.weight": "mlp.gate.weight",
    "ffn.expert_gate_up_proj": "mlp.experts.gate_up_proj",  # both in one
    "ffn.expert_down_proj.weight": "mlp.experts.down_proj",
}
_LLAMA = _ATTENTION | _FFN | {"ffn.gate_up.norm": "post_attention_layernorm.weight"}
_POST_NORM = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "ffn.gate_up.norm": "pre_feedforward_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}
#: parts outside the layers
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm": "model.norm.weight",
    "head.lm_head.weight": "lm_head.weight",
}
#: prefix of transformers' classes -> the parts of a layer
LAYERS: dict[str, dict[str, str]] = {
    "Llama": _LLAMA,
    "Mistral": _LLAMA,  # import only
    "Qwen3": _LLAMA | _QK_NORM,
    "Gemma3": _ATTENTION | _FFN | _QK_NORM | _POST_NORM,
    "Qwen2Moe": _ATTENTION | _EXPERTS | _SHARED_EXPERT,
    "Qwen3Moe": _ATTENTION | _EXPERTS | _QK_NORM,
}


class Target(NamedTuple):
    """A transformers model with the same function as a folded one."""

    family: str  #: a key of `LAYERS`
    #: normalized branches that a plain model of this family lacks; if there are any, our own modelling code is
    #: exported with the weights
    output_norms: frozenset[str] = frozenset()
    qk_of_outputs: bool = False  #: whether the gammas of q_norm and k_norm are those after the branches' outputs


def target(config: BackboneConfig, folded: Folded) -> Target:
    """Choose the family, with a plain model if one has the remaining norms."""
    _check_supported(config)
    normalized = frozenset(path.rpartition(".")[2] for path in folded.outputs)
    if config.post_norm:
        return Target("Gemma3", normalized)
    qwen3 = "Qwen3Moe" if config.n_expert else "Qwen3"
    if config.qk_norm:
        return Target(qwen3, normalized)
    if _is_qk_norm(config, folded, normalized):
        return Target(qwen3, qk_of_outputs=True)
    if config.n_expert:
        return Target("Qwen2Moe", normalized)
    if config.d_model % config.n_head:
        expected = f"a multiple of n_head, {config.n_head}, which transformers' Llama requires."
        raise ConfigError(f"model.backbone.d_model is {config.d_model}; expected {expected}")
    return Target("Llama", normalized)


def _check_supported(config: BackboneConfig) -> None:
    """Refuse the parts that no model of transformers has."""
    if config.router.balance == "bias":
        expected = "loss or none, which transformers' mixtures of experts support."
        raise ConfigError(f"model.backbone.router.balance is bias; expected {expected}")
    if config.post_norm and (not config.qk_norm or config.n_expert):
        expected = "false, or true with qk_norm and without n_expert, as in transformers' Gemma 3."
        raise ConfigError(f"model.backbone.post_norm is True; expected {expected}")
    if config.qk_norm and config.n_expert and config.n_expert_shared:
        expected = "false, or true with n_expert_shared 0, as in Qwen3-MoE."
        raise ConfigError(f"model.backbone.qk_norm is True; expected {expected}")


def _is_qk_norm(config: BackboneConfig, folded: Folded, normalized: frozenset[str]) -> bool:
    """Return True if the remaining norms are those of Qwen 3: after q and k, a gamma per head."""
    has_shared_expert = bool(config.n_expert and config.n_expert_shared)
    if normalized != {"q_proj", "k_proj"} or has_shared_expert:
        return False
    gammas = folded.outputs.values()
    return all(gamma is None or len(gamma) == config.head_width for gamma in gammas)


def their_names(family: str, n_layer: int) -> dict[str, str]:
    """Return our names -> their names for all parts of a model; a norm's key stands for its gamma."""
    names = dict(_OUTSIDE)
    for i in range(n_layer):
        for ours, theirs in LAYERS[family].items():
            names[f"layers.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    return names


def arguments(config: BackboneConfig, to: Target, max_positions: int, eot: int | None = None) -> dict[str, Any]:
    """Return the arguments of the transformers config class.

    `eot` is the id of the token at the start and end of a text; None omits their defaults too.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
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
        balance = config.router.balance_coef if config.router.balance == "loss" else 0.0
        shared |= ways_to_load(config) | {
            "qkv_bias": False,
            "num_experts": config.n_expert,
            "num_experts_per_tok": config.n_expert_active,
            "moe_intermediate_size": config.expert_width,
            "shared_expert_intermediate_size": config.ffn_width,
            "norm_topk_prob": config.router.renormalize,
            # theirs is k when balanced
            "router_aux_loss_coef": balance / config.n_expert_active,
        }
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


def ways_to_load(config: BackboneConfig) -> dict[str, str]:
    """Return the loading options for experts of any width, which config.json does not store.

    The default, a grouped product, requires strides of 16 bytes, a width of 8 in float32 and bf16.
    """
    ragged = config.n_expert and (config.expert_width % 8 or config.d_model % 8)
    return {"experts_implementation": "eager"} if ragged else {}


def names_in_version_4(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 that differ from those of `written`, a config of transformers 5.

    Without them, version 4 silently uses its defaults.
    """
    rope = written["rope_parameters"]
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    renamed = {"rope_theta": full["rope_theta"]}
    if full["rope_type"] != "default":
        renamed["rope_scaling"] = full
    if local is not None:
        renamed["rope_local_base_freq"] = local["rope_theta"]
    if "num_local_experts" in written:
        renamed["num_experts"] = written["num_local_experts"]
    return renamed


def _widths(config: BackboneConfig, names: frozenset[str]) -> Mapping[str, int]:
    """Return name in our modelling code -> channels normalized together, of each normalized branch."""
    per_head, experts = ("q_proj", "k_proj", "v_proj"), ("expert_gate_proj", "expert_up_proj")
    width = dict.fromkeys(per_head, config.head_width) | dict.fromkeys(experts, config.expert_width)
    width |= {"lm_head": config.vocab_size}
    return {name.removeprefix("shared_"): width.get(name, config.ffn_width) for name in sorted(names)}


@torch.no_grad()
def to_hugging_face(model: Backbone, eot: int | None = None, max_positions: int = 4096) -> Any:
    """Return a transformers model with the same logits.

    If the family has all norms that remain after folding, it is a plain model: LlamaForCausalLM, Gemma3ForCausalLM
    (`qk_norm` and `post_norm`), Qwen2MoeForCausalLM (`n_expert`), Qwen3ForCausalLM or Qwen3MoeForCausalLM
    (`qk_norm`, or `dnp` on q and k only with `share_heads`). Otherwise it is a class of `modeling_scaled`, whose code
    `save_pretrained` writes next to the weights. Additional parts of their models are neutralized: Gemma's
    embedding scale is divided out, and the sigmoid before Qwen's shared expert is one half with a down_proj twice as
    large.

    Args:
        model: backbone with any strategy
        eot: id of the token at which `generate` stops, as in the corpus's manifest.json
        max_positions: maximum sequence length

    Raises:
        ConfigError: transformers has no such model, or is not installed
    """
    folded = fold_weights(model, into_norms=True)
    to = target(model.config, folded)
    settings = arguments(model.config, to, max_positions, eot)
    if to.output_norms:
        own_code = import_module("lightning_sv.interop.hf.modeling_scaled")  # here, because it imports transformers
        model_of = getattr(own_code, f"Scaled{to.family}ForCausalLM")
        model_of.config_class.register_for_auto_class()
        model_of.register_for_auto_class("AutoModelForCausalLM")
        settings["auto_map"] = own_code.auto_map(to.family)
    else:
        model_of = getattr(transformers(), f"{to.family}ForCausalLM")
    theirs = model_of(model_of.config_class(**settings))
    # Version 5 does not write these keys of version 4, but it writes all attributes. Its setters would rename the keys.
    vars(theirs.config).update(names_in_version_4(theirs.config.to_dict()))
    # Gemma's embedding factor, sqrt(d_model) in float32
    scale = theirs.model.embed_tokens.embed_scale.item() if to.family == "Gemma3" else 1.0
    for parameter in theirs.parameters():  # not the buffers: the frequencies of RoPE stay in float32
        parameter.data = parameter.data.to(model.embed.weight.dtype)
    theirs.load_state_dict(_state(model.config, folded, to, scale))
    return theirs.eval()


def _state(config: BackboneConfig, folded: Folded, to: Target, embed_scale: float) -> dict[str, Tensor]:
    """Return the state dict of the transformers model."""
    ours = folded.weights | _norm_weights(config, folded, to)
    ours["embed.weight"] = ours["embed.weight"] / embed_scale
    if config.n_expert:
        _complete_experts(config, ours, shared=to.family == "Qwen2Moe")
    names = their_names(to.family, config.n_layer)
    state = {theirs: ours[mine] for mine, theirs in names.items()}
    if to.output_norms:
        for path, gamma in folded.outputs.items():
            _add_output_norm(state, names, path, gamma)
    return state


def _norm_weights(config: BackboneConfig, folded: Folded, to: Target) -> dict[str, Tensor]:
    """Return the weight of each norm in their form: gamma, or gamma - 1 in Gemma."""
    gammas = dict(folded.norms)
    if to.qk_of_outputs:
        for path, gamma in folded.outputs.items():
            gammas[path.replace("qkv.", "").replace("proj", "norm")] = gamma
    like = folded.weights["embed.weight"]
    weights = {}
    for path, gamma in gammas.items():
        per_head = path.endswith(("q_norm", "k_norm"))
        width = config.head_width if per_head else config.d_model
        weight = like.new_ones(width) if gamma is None else gamma
        weights[path] = weight - 1 if to.family == "Gemma3" else weight
    return weights


def _add_output_norm(state: dict[str, Tensor], names: dict[str, str], path: str, gamma: Tensor | None) -> None:
    """Add the gamma of a normalized branch, and rename its weight, as in `modeling_scaled`."""
    if path.endswith(("expert_gate_proj", "expert_up_proj")):
        experts = names[f"{path.partition('.inputs')[0]}.expert_down_proj.weight"].removesuffix(".down_proj")
        n, _, hidden = state[f"{experts}.down_proj"].shape
        state.setdefault(f"{experts}.gamma", state[f"{experts}.down_proj"].new_ones(n, hidden))
        if gamma is not None:
            state[f"{experts}.gamma"] = gamma
        return
    branch = names[f"{path}.weight"].removesuffix(".weight")
    weight = state.pop(f"{branch}.weight")
    d_out = len(weight)
    state[f"{branch}.linear.weight"] = weight
    state[f"{branch}.gamma"] = weight.new_ones(d_out) if gamma is None else gamma.repeat(d_out // len(gamma))


def _complete_experts(config: BackboneConfig, ours: dict[str, Tensor], *, shared: bool) -> None:
    """Concatenate gate and up; with `shared`, complete the shared expert and its gate, which Qwen2-MoE always has.

    Their gate is a sigmoid, which is one half for a weight of 0.
    """
    zeros = ours["embed.weight"].new_zeros
    for i in range(config.n_layer):
        path = f"layers.{i}.ffn"
        pair = [ours[f"{path}.inputs.expert_{side}_proj.weight"] for side in ("gate", "up")]
        ours[f"{path}.expert_gate_up_proj"] = torch.cat(pair, dim=1)
        if not shared:
            continue
        if not config.n_expert_shared:
            for side in ("gate", "up"):
                ours[f"{path}.inputs.shared_{side}_proj.weight"] = zeros(config.ffn_width, config.d_model)
            ours[f"{path}.shared_down_proj.weight"] = zeros(config.d_model, config.ffn_width)
        if f"{path}.inputs.shared_router.weight" not in ours:
            ours[f"{path}.inputs.shared_router.weight"] = zeros(1, config.d_model)
            ours[f"{path}.shared_down_proj.weight"] = 2 * ours[f"{path}.shared_down_proj.weight"]
