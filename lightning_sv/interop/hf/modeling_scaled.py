"""Models with normalized linear outputs, y = gamma Norm(W x).

These are Llama, Qwen 3, Gemma 3 and mixtures of experts. lightning_sv writes this file next to the
weights of models trained with `dnp` ("dual, normalized"); it needs only torch and transformers.
`output_norms` of the config: name of a linear map -> channels normalized together.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


def normalize(y: Tensor, width: int, eps: float, gamma: Tensor) -> Tensor:
    """Return gamma * y / sqrt(mean(y^2) + eps) over groups of `width` channels, in float32."""
    wide = y.float().unflatten(-1, (-1, width))  # (..., groups, width)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out: Tensor = (wide.flatten(-2) * gamma.to(wide.dtype)).to(y.dtype)
    return out


class NormedLinear(nn.Module):
    """y = gamma * Norm(W x).

    Only the inner map W is an nn.Linear. Tools that look for nn.Linear, such as LoRA and
    quantization, replace or merge what they find. If this module were one, they would drop its
    norm.
    """

    def __init__(self, d_in: int, d_out: int, width: int, eps: float):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=False)
        self.gamma = nn.Parameter(torch.ones(d_out))
        self.width = width
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return normalize(self.linear(x), self.width, self.eps, self.gamma)


class NormedExperts(nn.Module):
    """SwiGLU experts whose gate, up or both are normalized; up's gamma is in down_proj."""

    def __init__(self, config: Any):
        super().__init__()
        n = config.num_experts
        d = config.hidden_size
        hidden = config.moe_intermediate_size
        self.norms = config.output_norms
        self.eps = config.rms_norm_eps
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * hidden, d))
        self.down_proj = nn.Parameter(torch.empty(n, d, hidden))
        self.gamma = nn.Parameter(torch.ones(n, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(N, d), (N, k) experts, (N, k) weights -> (N, d)."""
        if type(chosen) is not Tensor:  # while a model is traced, it has no values
            return self._all_experts(x, chosen, weights)
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = torch.where(chosen == e)
            share = weights[token, place, None]  # (tokens of e, 1)
            out.index_add_(0, token, (self.expert(e, x[token]) * share).to(out.dtype))
        return out

    def _all_experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Apply all experts to all tokens, with a weight of 0 if they are not chosen."""
        outputs = []
        for e in range(len(self.gamma)):
            share = (weights * (chosen == e)).sum(-1, keepdim=True)  # (N, 1)
            outputs.append(self.expert(e, x) * share)
        return torch.stack(outputs).sum(0).to(x.dtype)

    def expert(self, e: int, x: Tensor) -> Tensor:
        """(N, d) -> (N, d) of expert `e`, without its weight."""
        gate, up = F.linear(x, self.gate_up_proj[e]).chunk(2, dim=-1)
        gamma = self.gamma[e]  # that of gate; up's is part of down_proj
        if "expert_gate_proj" in self.norms:
            gate = normalize(gate, gate.shape[-1], self.eps, gamma)
            gamma = torch.ones_like(gamma)
        if "expert_up_proj" in self.norms:  # without norms of gate, gamma is 1
            up = normalize(up, up.shape[-1], self.eps, gamma)
        return F.linear(F.silu(gate) * up, self.down_proj[e])


class OutputNorms(nn.Module):
    """Add the norms named in the config to a transformers model."""

    #: no tensor parallelism: a norm needs all channels of its matrix
    _tp_plan: ClassVar[dict[str, str]] = {}

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
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        **options: Any,
    ) -> nn.Embedding:
        """Resize the vocabulary, unless the logits are normalized over it.

        Each new token would then change all logits.
        """
        config: Any = self.config
        is_same = new_num_tokens in (None, config.vocab_size) and pad_to_multiple_of is None
        if not isinstance(self.get_output_embeddings(), NormedLinear):
            resize: Any = super().resize_token_embeddings  # type: ignore[misc]
            embedding: nn.Embedding = resize(new_num_tokens, pad_to_multiple_of, **options)
            return embedding
        if not is_same:
            raise NotImplementedError(
                "cannot resize this model, because its logits are normalized over the vocabulary; "
                "train it with the larger vocabulary, or with dp at the lm_head."
            )
        return self.get_input_embeddings()


def with_norm(name: str, module: nn.Module, config: Any) -> nn.Module | None:
    """Return the replacement of a transformers module; None if the config names no norm in it."""
    if name == "experts":
        if isinstance(module, nn.ModuleList):  # version 4, which would initialize the weights
            hint = "pip install 'transformers>=5'"
            raise ImportError(f"this model has experts, which need transformers 5; {hint}")
        has_norm = any(key.startswith("expert_") for key in config.output_norms)
        return NormedExperts(config) if has_norm else None
    if name not in config.output_norms or not isinstance(module, nn.Linear):
        return None
    width = config.output_norms[name]
    return NormedLinear(module.in_features, module.out_features, width, config.rms_norm_eps)


#: family -> its configuration, and model_type
FAMILIES = {
    "Llama": (transformers.LlamaConfig, "scaled_llama"),
    "Qwen3": (transformers.Qwen3Config, "scaled_qwen3"),
    "Gemma3": (transformers.Gemma3TextConfig, "scaled_gemma3"),
    "Qwen2Moe": (transformers.Qwen2MoeConfig, "scaled_qwen2_moe"),
    "Qwen3Moe": (transformers.Qwen3MoeConfig, "scaled_qwen3_moe"),
}
#: class of transformers.Auto* -> the last part of a family's class
AUTO_CLASSES = {"AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
#: text models whose names differ from their families'
_TEXT_MODELS = {"Gemma3Model": "Gemma3TextModel"}


def auto_map(family: str) -> dict[str, str]:
    """Return `auto_map` of config.json: class of transformers.Auto* -> our class."""
    file = __name__.rpartition(".")[2]
    return {auto: f"{file}.Scaled{family}{ending}" for auto, ending in AUTO_CLASSES.items()}


def _classes(family: str) -> dict[str, type]:
    """Return the classes of a family with `output_norms`, such as ScaledLlamaForCausalLM."""
    config, model_type = FAMILIES[family]
    shared = {"__module__": __name__, "__doc__": f"{family} with `output_norms`."}
    fields = {
        "model_type": model_type,
        "output_norms": None,
        "__annotations__": {"output_norms": dict | None},
        "base_model_tp_plan": None,  # as in OutputNorms
    }
    scaled = type(f"Scaled{family}Config", (config,), shared | fields)
    classes = {scaled.__name__: scaled}
    for ending in AUTO_CLASSES.values():
        name = f"{family}{ending}"
        plain = getattr(transformers, _TEXT_MODELS.get(name, name))
        members = shared | {"config_class": scaled}
        classes[f"Scaled{name}"] = type(f"Scaled{name}", (OutputNorms, plain), members)
    return classes


for _family in FAMILIES:
    globals().update(_classes(_family))
