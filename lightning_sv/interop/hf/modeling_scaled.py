"""Llama, Qwen 3, Gemma 3 and mixtures of experts with normalized linear outputs: y = gamma Norm(W x).

lightning_sv writes this file next to the weights of models trained with `dnp` ("dual, normalized"); it needs only
torch and transformers. `output_norms` of the config: name of a linear map -> channels normalized together.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


def normalize(y: Tensor, width: int, eps: float, gamma: Tensor) -> Tensor:
    """Return gamma * y / sqrt(mean(y^2) + eps) over groups of `width` channels, computed in float32."""
    wide = y.float().unflatten(-1, (-1, width))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out: Tensor = (wide.flatten(-2) * gamma.to(wide.dtype)).to(y.dtype)
    return out


class NormedLinear(nn.Module):
    """y = gamma * Norm(W x).

    Only the inner map W is an nn.Linear. Tools that look for nn.Linear, such as LoRA and quantization, replace or merge
    what they find. If this module were one, they would drop its norm.
    """

    def __init__(self, d_in: int, d_out: int, width: int, eps: float):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=False)
        self.gamma = nn.Parameter(torch.ones(d_out))
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return normalize(self.linear(x), self.width, self.eps, self.gamma)


class NormedExperts(nn.Module):
    """SwiGLU experts whose gate, up or both are normalized; up's gamma is in down_proj."""

    def __init__(self, config: Any):
        super().__init__()
        n, d, hidden = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.norms, self.eps = config.output_norms, config.rms_norm_eps
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * hidden, d))
        self.down_proj = nn.Parameter(torch.empty(n, d, hidden))
        self.gamma = nn.Parameter(torch.ones(n, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(N, d), (N, k) experts, (N, k) weights -> (N, d)."""
        if type(chosen) is not Tensor:  # while a model is traced, it has no values: all experts for all tokens
            shares = [(weights * (chosen == e)).sum(-1, keepdim=True) for e in range(len(self.gamma))]
            return torch.stack([self.expert(e, x) * share for e, share in enumerate(shares)]).sum(0).to(x.dtype)
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = torch.where(chosen == e)
            out.index_add_(0, token, (self.expert(e, x[token]) * weights[token, place, None]).to(out.dtype))
        return out

    def expert(self, e: int, x: Tensor) -> Tensor:
        """(N, d) -> (N, d) of expert `e`, without its weight."""
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        gamma = self.gamma[e]  # that of gate; up's is part of down_proj
        if "expert_gate_proj" in self.norms:
            gate, gamma = normalize(gate, gate.shape[-1], self.eps, gamma), torch.ones_like(gamma)
        if "expert_up_proj" in self.norms:  # without norms of gate, gamma is 1
            up = normalize(up, up.shape[-1], self.eps, gamma)
        return F.linear(F.silu(gate) * up, self.down_proj[e])


class OutputNorms(nn.Module):
    """Add the norms named in the config to a transformers model."""

    _tp_plan: ClassVar[dict[str, str]] = {}  # no tensor parallelism: a norm needs all channels of its matrix

    get_input_embeddings: Callable[[], nn.Embedding]  # of transformers
    get_output_embeddings: Callable[[], nn.Module | None]

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]  # mixed into a model class
        for path, module in list(self.named_modules()):
            parent, _, name = path.rpartition(".")
            new = with_norm(name, module, config)
            if new is not None:
                setattr(self.get_submodule(parent), name, new)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **options: Any
    ) -> nn.Embedding:
        """Resize the vocabulary, unless the logits are normalized over it: then each new token changes all logits."""
        model: Any = super()
        if not isinstance(self.get_output_embeddings(), NormedLinear):
            resized: nn.Embedding = model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, **options)
            return resized
        config: Any = self.config
        if new_num_tokens not in (None, config.vocab_size) or pad_to_multiple_of is not None:
            raise NotImplementedError(
                "cannot resize this model, because its logits are normalized over the vocabulary; "
                "train it with the larger vocabulary, or with dp at the lm_head."
            )
        return self.get_input_embeddings()


def with_norm(name: str, module: nn.Module, config: Any) -> nn.Module | None:
    """Return the replacement of a transformers module; None if the config names no norm in it."""
    if name == "experts":
        if isinstance(module, nn.ModuleList):  # version 4, which would initialize the weights
            raise ImportError("this model has experts, which need transformers 5; pip install 'transformers>=5'")
        has_norm = any(key.startswith("expert_") for key in config.output_norms)
        return NormedExperts(config) if has_norm else None
    if name not in config.output_norms or not isinstance(module, nn.Linear):
        return None
    width, eps = config.output_norms[name], config.rms_norm_eps
    return NormedLinear(module.in_features, module.out_features, width, eps)


#: family -> its configuration, and model_type
FAMILIES = {
    "Llama": (transformers.LlamaConfig, "scaled_llama"),
    "Qwen3": (transformers.Qwen3Config, "scaled_qwen3"),
    "Gemma3": (transformers.Gemma3TextConfig, "scaled_gemma3"),
    "Qwen2Moe": (transformers.Qwen2MoeConfig, "scaled_qwen2_moe"),
    "Qwen3Moe": (transformers.Qwen3MoeConfig, "scaled_qwen3_moe"),
}
#: class of transformers.Auto* -> the last part of a family's class
AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
}
#: text models whose names differ from their families'
_TEXT_MODELS = {
    "Gemma3Model": "Gemma3TextModel",
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
}


def auto_map(family: str) -> dict[str, str]:
    """Return `auto_map` of config.json: class of transformers.Auto* -> our class, such as ScaledLlamaForCausalLM."""
    file = __name__.rpartition(".")[2]
    return {auto_class: f"{file}.Scaled{family}{ending}" for auto_class, ending in AUTO_CLASSES.items()}


for family, (config, model_type) in FAMILIES.items():
    names = {"__module__": __name__, "__doc__": f"{family} with `output_norms`."}
    fields = {"model_type": model_type, "output_norms": None, "__annotations__": {"output_norms": dict | None}}
    fields["base_model_tp_plan"] = None  # as in OutputNorms
    scaled = type(f"Scaled{family}Config", (config,), names | fields)
    globals()[scaled.__name__] = scaled
    for ending in AUTO_CLASSES.values():
        name = f"{family}{ending}"
        plain = getattr(transformers, _TEXT_MODELS.get(name, name))
        globals()[f"Scaled{name}"] = type(f"Scaled{name}", (OutputNorms, plain), names | {"config_class": scaled})
