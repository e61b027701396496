"""Weight-decay rules of frameworks, according to their sources, as policies of the paper."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_sv.roles import ModelParameter, Roles
from lightning_sv.scale import ScaleStrategy
from lightning_sv.scale.strategy import DECAYS

_TRAINER_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def _trainer(parameter: ModelParameter, in_layer_norm: bool) -> bool:
    """Return True if transformers' `Trainer.get_decay_parameter_names` includes the parameter."""
    return not in_layer_norm and not any(re.search(p, parameter.name.lower()) for p in _TRAINER_PATTERNS)


class Framework(NamedTuple):
    """Weight-decay rule of one framework."""

    name: str  #: with the version of the source if there is one
    rule: str
    decays: Callable[[ModelParameter, bool], bool]  #: (parameter, whether it belongs to an nn.LayerNorm) -> decays


FRAMEWORKS = (
    Framework("transformers Trainer 5.23", "no biases, no LayerNorm, no name with 'norm'", _trainer),
    Framework("Megatron-LM", "no vectors, no biases", lambda p, _: len(p.shape) > 1 and not p.name.endswith("bias")),
    Framework("nanoGPT", "two axes or more", lambda p, _: len(p.shape) > 1),
    Framework("torchtitan 0.3", "everything", lambda p, _: True),
    Framework("litgpt 0.5", "everything", lambda p, _: True),
    Framework("OLMo-core 3.0", "everything but embeddings", lambda p, _: p.role != "embedding"),
)


@dataclass(frozen=True)
class FrameworkDecay:
    """Treatment of one model's scale vectors by a framework."""

    framework: str  #: name of the framework
    rule: str  #: description of its rule
    input: tuple[int, int]  #: (number of decaying input-side vectors, their total number)
    output: tuple[int, int]  #: the same for output-side vectors
    policy: str  #: 'wd', 'iwd', 'owd' or 'nowd'; 'mixed' if vectors of one side differ; 'none' if there are none


def framework_decay(model: nn.Module, roles: Roles) -> list[FrameworkDecay]:
    """Return which of the model's scale vectors decay under each framework's rule."""
    layer_norms = {path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    vectors = [p for p in roles.parameters if p.role in ("input", "output") and p.trained]
    rows = []
    for name, rule, decays in FRAMEWORKS:
        decayed: dict[str, list[bool]] = {"input": [], "output": []}
        for p in vectors:
            decayed[p.role].append(decays(p, p.name.rpartition(".")[0] in layer_norms))
        counts = {role: (sum(some), len(some)) for role, some in decayed.items()}
        policy = _policy({role: set(some) for role, some in decayed.items() if some})
        rows.append(FrameworkDecay(name, rule, counts["input"], counts["output"], policy))
    return rows


def _policy(sides: dict[str, set[bool]]) -> str:
    """Return the policies that decay these sides; with one side only, several policies are equal."""
    if not sides:
        return "none"
    if any(len(decays) > 1 for decays in sides.values()):
        return "mixed"
    decayed = {role for role, decays in sides.items() if True in decays}
    return " = ".join(name for name in DECAYS if ScaleStrategy(decay=name).decayed_roles & set(sides) == decayed)
