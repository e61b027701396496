"""Families of transformers' models: the names of their parts, and the family of a folded model.

A folded model has fewer norms than its strategy. If a plain family has all of them, no code is
exported:

    no norms but the usual     Llama, or Qwen2-MoE with experts
    + one after q and k        Qwen 3, Qwen3-MoE
    + post-norms               Gemma 3
    any other                  one of these with our `modeling_scaled`; refused with experts
"""

from typing import NamedTuple

from lightning_sv.errors import ConfigError
from lightning_sv.interop.fold import Folded
from lightning_sv.nn import BackboneConfig

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
    "Qwen3": _LLAMA | _QK_NORM,
    "Gemma3": _ATTENTION | _FFN | _QK_NORM | _POST_NORM,
    "Qwen2Moe": _ATTENTION | _EXPERTS | _SHARED_EXPERT,
    "Qwen3Moe": _ATTENTION | _EXPERTS | _QK_NORM,
}


class Target(NamedTuple):
    """A transformers model with the same function as a folded one."""

    family: str  #: a key of `LAYERS`
    #: normalized branches that a plain model of this family lacks; if there are any, our own
    #: modelling code is exported with the weights
    output_norms: frozenset[str] = frozenset()
    #: whether the gammas of q_norm and k_norm are those after the branches' outputs
    qk_of_outputs: bool = False


def target(config: BackboneConfig, folded: Folded) -> Target:
    """Choose the family, with a plain model if one has the remaining norms."""
    _check_supported(config)
    normalized = frozenset(path.rpartition(".")[2] for path in folded.outputs)
    is_qk_norm = _is_qk_norm(config, folded, normalized)
    if config.n_expert:
        return _target_of_experts(config, normalized, is_qk_norm=is_qk_norm)
    if config.post_norm:
        return Target("Gemma3", normalized)
    if config.qk_norm:
        return Target("Qwen3", normalized)
    if is_qk_norm:
        return Target("Qwen3", qk_of_outputs=True)
    if config.d_model % config.n_head:
        expected = f"a multiple of n_head, {config.n_head}, which transformers' Llama requires."
        raise ConfigError(f"model.backbone.d_model is {config.d_model}; expected {expected}")
    return Target("Llama", normalized)


def _target_of_experts(
    config: BackboneConfig, normalized: frozenset[str], *, is_qk_norm: bool
) -> Target:
    """Choose the family of a mixture of experts, for which there is no modelling code of ours."""
    if is_qk_norm:
        return Target("Qwen3Moe", qk_of_outputs=True)
    if normalized:
        found = f"{config.n_expert}, and the outputs of {' '.join(sorted(normalized))} normalized"
        expected = "no normalized outputs in a mixture of experts. Train it with dp in place of dnp"
        raise ConfigError(f"model.backbone.n_expert is {found}; expected {expected}.")
    return Target("Qwen3Moe" if config.qk_norm else "Qwen2Moe")


def _check_supported(config: BackboneConfig) -> None:
    """Refuse the parts that no model of transformers has."""
    if config.router.balance == "bias":
        expected = "loss or none, which transformers' mixtures of experts support."
        raise ConfigError(f"model.backbone.router.balance is bias; expected {expected}")
    is_gemma = config.qk_norm and not config.n_expert
    if config.post_norm and not is_gemma:
        expected = "false, or true with qk_norm and without n_expert, as in transformers' Gemma 3."
        raise ConfigError(f"model.backbone.post_norm is True; expected {expected}")
    if config.qk_norm and _has_shared_expert(config):
        expected = "false, or true with n_expert_shared 0, as in Qwen3-MoE."
        raise ConfigError(f"model.backbone.qk_norm is True; expected {expected}")


def _has_shared_expert(config: BackboneConfig) -> bool:
    return bool(config.n_expert and config.n_expert_shared)


def _is_qk_norm(config: BackboneConfig, folded: Folded, normalized: frozenset[str]) -> bool:
    """Return True if the remaining norms are those of Qwen 3: after q and k, a gamma per head."""
    if normalized != {"q_proj", "k_proj"} or _has_shared_expert(config):
        return False
    for gamma in folded.outputs.values():
        if gamma is not None and len(gamma) != config.head_width:
            return False
    return True


def their_names(family: str, n_layer: int) -> dict[str, str]:
    """Return our names -> their names for all parts of a model.

    A norm's key stands for its gamma.
    """
    names = dict(_OUTSIDE)
    for i in range(n_layer):
        for ours, theirs in LAYERS[family].items():
            names[f"layers.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    return names
