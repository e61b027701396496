"""Models with normalized linear outputs, y = gamma Norm(W x).

These are Llama, Qwen 3 and Gemma 3. lightning_sv writes this file next to the
weights of models trained with `dnp` ("dual, normalized"); it needs only torch and transformers.
`output_norms` of the config: name of a linear map -> channels normalized together.
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn


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


class OutputNorms(nn.Module):
    """Add the norms named in the config to a transformers model."""

    #: no tensor parallelism: a norm needs all channels of its matrix
    _tp_plan: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]  # mixed into a model class
        for path, module in list(self.named_modules()):
            parent, _, name = path.rpartition(".")
            new = with_norm(name, module, config)
            if new is not None:
                setattr(self.get_submodule(parent), name, new)


def with_norm(name: str, module: nn.Module, config: Any) -> nn.Module | None:
    """Return the replacement of a transformers module; None if the config names no norm in it."""
    if name not in config.output_norms or not isinstance(module, nn.Linear):
        return None
    width = config.output_norms[name]
    return NormedLinear(module.in_features, module.out_features, width, config.rms_norm_eps)


#: family -> its configuration, and model_type
FAMILIES = {
    "Llama": (transformers.LlamaConfig, "scaled_llama"),
    "Qwen3": (transformers.Qwen3Config, "scaled_qwen3"),
    "Gemma3": (transformers.Gemma3TextConfig, "scaled_gemma3"),
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
