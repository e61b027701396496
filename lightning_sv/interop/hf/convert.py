"""Conversion of a backbone to a transformers model with the same logits."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_sv.interop.fold import Folded, fold_weights
from lightning_sv.interop.hf.families import Target, arguments, keys, target
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.roles.fake import transformers


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
    module = transformers()
    if to.output_norms:  # that module imports transformers
        module = import_module("lightning_sv.interop.hf.modeling_scaled")
    prefix = f"Scaled{to.family}" if to.output_norms else to.family
    config_of = getattr(module, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    model_of = getattr(module, f"{prefix}ForCausalLM")
    if to.output_norms:
        config_of.register_for_auto_class()
        model_of.register_for_auto_class("AutoModelForCausalLM")
    theirs = model_of(config_of(**arguments(model.config, to, max_positions, eot)))
    # Gemma's embedding factor, sqrt(d_model) in float32
    scale = theirs.model.embed_tokens.embed_scale.item() if to.family == "Gemma3" else 1.0
    theirs.to(model.embed.weight.dtype).load_state_dict(_state(model.config, folded, to, scale))
    return theirs.eval()


def _state(config: BackboneConfig, folded: Folded, to: Target, embed_scale: float) -> dict[str, Tensor]:
    """Return the state dict of the transformers model."""
    ours, like = dict(folded.weights), folded.weights["embed.weight"]
    width = {"q_norm": config.head_width, "k_norm": config.head_width}
    norms = dict(folded.norms)
    if to.qk_of_outputs:
        for path, gamma in folded.outputs.items():
            norms[path.replace("qkv.", "").replace("proj", "norm")] = gamma
    for path, gamma in norms.items():
        one = like.new_ones(width.get(path.rpartition(".")[2], config.d_model))
        ours[path] = (one if gamma is None else gamma) - (1 if to.family == "Gemma3" else 0)  # theirs is 1 + w
    ours["embed.weight"] = like / embed_scale
    if config.n_expert:
        _complete_experts(config, ours, shared=to.family == "Qwen2Moe")
    names = keys(to.family, config.n_layer)
    state = {theirs: ours[mine] for mine, theirs in names.items()}
    if to.output_norms:
        for path, gamma in folded.outputs.items():
            _add_output_norm(state, names, path, gamma)
    return state


def _add_output_norm(state: dict[str, Tensor], names: dict[str, str], path: str, gamma: Tensor | None) -> None:
    """Add the gamma of a normalized branch, as in `modeling_scaled`."""
    if path.endswith(("expert_gate_proj", "expert_up_proj")):
        experts = names[f"{path.partition('.inputs')[0]}.expert_down_proj.weight"].removesuffix(".down_proj")
        n, _, hidden = state[f"{experts}.down_proj"].shape
        state.setdefault(f"{experts}.gamma", state[f"{experts}.down_proj"].new_ones(n, hidden))
        if gamma is not None:
            state[f"{experts}.gamma"] = gamma
        return
    weight = names[f"{path}.weight"]
    d_out = len(state[weight])
    full = state[weight].new_ones(d_out) if gamma is None else gamma.repeat(d_out // len(gamma))
    state[f"{weight.removesuffix('weight')}gamma"] = full


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
