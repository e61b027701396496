"""Llama, Qwen 3, Gemma 3 and mixtures of experts with normalized linear outputs: y = gamma Norm(W x).

lightning_sv writes this file next to the weights of models trained with `dnp` ("dual, normalized"); it needs only
torch and transformers. `output_norms` of the config: name of a linear map -> channels normalized together.
"""

from typing import Any

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


class NormedLinear(nn.Linear):
    """y = gamma * Norm(W x)."""

    def __init__(self, d_in: int, d_out: int, width: int, eps: float):
        super().__init__(d_in, d_out, bias=False)
        self.width, self.eps, self.gamma = width, eps, nn.Parameter(torch.ones(d_out))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return normalize(super().forward(x), self.width, self.eps, self.gamma)


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

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]  # mixed into a model class
        for path, module in list(self.named_modules()):
            parent, _, name = path.rpartition(".")
            if name == "experts" and isinstance(module, nn.ModuleList):  # version 4, which would initialize the weights
                raise ImportError("this model has experts, which need transformers 5; pip install 'transformers>=5'")
            if name in config.output_norms and isinstance(module, nn.Linear):
                width, eps = config.output_norms[name], config.rms_norm_eps
                new: nn.Module = NormedLinear(module.in_features, module.out_features, width, eps)
            elif name == "experts" and any(key.startswith("expert_") for key in config.output_norms):
                new = NormedExperts(config)
            else:
                continue
            setattr(self.get_submodule(parent), name, new)


#: family -> its configuration and model_type; each has a ScaledLlamaConfig and a ScaledLlamaForCausalLM
FAMILIES = {
    "Llama": (transformers.LlamaConfig, "scaled_llama"),
    "Qwen3": (transformers.Qwen3Config, "scaled_qwen3"),
    "Gemma3": (transformers.Gemma3TextConfig, "scaled_gemma3"),
    "Qwen2Moe": (transformers.Qwen2MoeConfig, "scaled_qwen2_moe"),
    "Qwen3Moe": (transformers.Qwen3MoeConfig, "scaled_qwen3_moe"),
}
for family, (config, model_type) in FAMILIES.items():
    names = {"__module__": __name__, "__doc__": f"{family} with `output_norms`."}
    fields = {"model_type": model_type, "output_norms": None, "__annotations__": {"output_norms": dict | None}}
    scaled = type(f"Scaled{family}Config", (config,), names | fields)
    bases = (OutputNorms, getattr(transformers, f"{family}ForCausalLM"))
    model = type(f"Scaled{family}ForCausalLM", bases, names | {"config_class": scaled})
    globals().update({scaled.__name__: scaled, model.__name__: model})
