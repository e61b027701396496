"""Conversion of a backbone to a transformers model with the same logits.

    fold       gammas next to matrices become part of them; a few remain in norms
    target     the family that has the remaining norms (`families.py`)
    config     its sizes in their words (`configs.py`)
    weights    ours, under their names

Parts that only their model has must do nothing: the embedding is divided by Gemma's factor. The
gate of Qwen's shared expert has weights of 0, so sigmoid(0) = 1/2, and a down_proj twice as large.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_sv.interop.fold import Folded, fold_weights
from lightning_sv.interop.hf.configs import arguments, names_in_version_4
from lightning_sv.interop.hf.families import Target, target, their_names
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.roles.fake import transformers


@torch.no_grad()
def to_hugging_face(model: Backbone, eot: int | None = None, max_positions: int = 4096) -> Any:
    """Return a transformers model with the same logits.

    If the family has all norms that remain after folding, it is a plain model: LlamaForCausalLM,
    Gemma3ForCausalLM (`qk_norm` and `post_norm`), Qwen2MoeForCausalLM (`n_expert`),
    Qwen3ForCausalLM or Qwen3MoeForCausalLM (`qk_norm`, or `dnp` on q and k only with
    `share_heads`). Otherwise, without experts, it is a class of `modeling_scaled`, whose code
    `save_pretrained` writes next to the weights. Additional parts of their models are neutralized:
    Gemma's embedding scale is divided out, and the sigmoid before Qwen's shared expert is one half
    with a down_proj twice as large.

    Args:
        model: backbone with any strategy
        eot: id of the token at which `generate` stops, as in the corpus's manifest.json
        max_positions: maximum sequence length

    Raises:
        ConfigError: transformers has no such model, or is not installed
    """
    folded = fold_weights(model, into_norms=True)
    to = target(model.config, folded)
    theirs = _new_model(to, arguments(model.config, to, max_positions, eot))
    for parameter in theirs.parameters():  # not the buffers: RoPE's frequencies stay in float32
        parameter.data = parameter.data.to(model.embed.weight.dtype)
    state = _state(model.config, folded, to)
    if to.family == "Gemma3":
        _divide_embedding(state, theirs)
    theirs.load_state_dict(state)
    return theirs.eval()


def _new_model(to: Target, settings: dict[str, Any]) -> Any:
    """Return a transformers model with these arguments of its config, and random weights."""
    if to.output_norms:
        own_code = import_module("lightning_sv.interop.hf.modeling_scaled")  # imports transformers
        model_of = getattr(own_code, f"Scaled{to.family}ForCausalLM")
        _register_code(model_of)
        settings = settings | {"auto_map": own_code.auto_map(to.family)}
    else:
        model_of = getattr(transformers(), f"{to.family}ForCausalLM")

    theirs = model_of(model_of.config_class(**settings))
    # Version 5 does not write these keys of version 4, but it writes all attributes. Its setters
    # would rename the keys.
    vars(theirs.config).update(names_in_version_4(theirs.config.to_dict()))
    return theirs


def _register_code(model_of: Any) -> None:
    """Let `save_pretrained` write the code of our own class next to the weights."""
    model_of.config_class.register_for_auto_class()
    model_of.register_for_auto_class("AutoModelForCausalLM")


def _divide_embedding(state: dict[str, Tensor], gemma: Any) -> None:
    """Divide the embedding by Gemma's factor, sqrt(d_model) in float32."""
    name = "model.embed_tokens.weight"
    state[name] = state[name] / gemma.model.embed_tokens.embed_scale.item()


def _state(config: BackboneConfig, folded: Folded, to: Target) -> dict[str, Tensor]:
    """Return the state dict of the transformers model, but for Gemma's embedding scale."""
    ours = folded.weights | _norm_weights(config, folded, to)
    if config.n_expert:
        for i in range(config.n_layer):
            _join_experts(config, ours, f"layers.{i}.ffn", to)

    names = their_names(to.family, config.n_layer)
    state = {theirs: ours[mine] for mine, theirs in names.items()}
    if to.output_norms:
        for path, gamma in folded.outputs.items():
            _add_gamma_of_branch(state, names, path, gamma)
    return state


def _join_experts(config: BackboneConfig, ours: dict[str, Tensor], path: str, to: Target) -> None:
    """Put the gates and ups of all experts into one tensor."""
    gate = ours[f"{path}.inputs.expert_gate_proj.weight"]  # (n_expert, d_expert, d)
    up = ours[f"{path}.inputs.expert_up_proj.weight"]
    ours[f"{path}.expert_gate_up_proj"] = torch.cat([gate, up], dim=1)  # (n_expert, 2 d_expert, d)
    if to.family == "Qwen2Moe":
        _complete_shared_expert(config, ours, path)


def _norm_weights(config: BackboneConfig, folded: Folded, to: Target) -> dict[str, Tensor]:
    """Return the weight of each norm in their form: gamma, or gamma - 1 in Gemma."""
    gammas = dict(folded.norms)
    if to.qk_of_outputs:
        for path, gamma in folded.outputs.items():
            gammas[path.replace("qkv.", "").replace("proj", "norm")] = gamma
    origin = 0
    if to.family == "Gemma3":
        origin = 1
    weights = {}
    for path, gamma in gammas.items():
        width = config.d_model
        if path.endswith(("q_norm", "k_norm")):
            width = config.head_width
        if gamma is None:
            gamma = folded.weights["embed.weight"].new_ones(width)
        weights[path] = gamma - origin
    return weights


def _add_gamma_of_branch(
    state: dict[str, Tensor], names: dict[str, str], path: str, gamma: Tensor | None
) -> None:
    """Add the gamma of a normalized branch, and rename its weight, as in `NormedLinear`."""
    branch = names[f"{path}.weight"].removesuffix(".weight")
    weight = state.pop(f"{branch}.weight")  # (d_out, d_in)
    state[f"{branch}.linear.weight"] = weight
    d_out = len(weight)
    if gamma is None:
        gamma = weight.new_ones(d_out)
    n_repeats = d_out // len(gamma)  # heads, if they share one gamma; else 1
    state[f"{branch}.gamma"] = gamma.repeat(n_repeats)


def _complete_shared_expert(config: BackboneConfig, ours: dict[str, Tensor], path: str) -> None:
    """Add the shared expert and its gate, which Qwen2-MoE always has.

    Their gate is a sigmoid, which is one half for a weight of 0.
    """
    zeros = ours["embed.weight"].new_zeros
    down = f"{path}.shared_down_proj.weight"
    if not config.n_expert_shared:
        ours[f"{path}.inputs.shared_gate_proj.weight"] = zeros(config.ffn_width, config.d_model)
        ours[f"{path}.inputs.shared_up_proj.weight"] = zeros(config.ffn_width, config.d_model)
        ours[down] = zeros(config.d_model, config.ffn_width)
    router = f"{path}.inputs.shared_router.weight"
    if router not in ours:
        ours[router] = zeros(1, config.d_model)
        ours[down] = 2 * ours[down]
