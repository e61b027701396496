"""Weight-decay rules of frameworks, according to their sources, as policies of the paper."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lightning_sv.roles import ModelParameter, Roles
from lightning_sv.scale import ScaleStrategy
from lightning_sv.scale.strategy import DECAYS

_TRAINER_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def _trainer(parameter: ModelParameter, in_layer_norm: bool) -> bool:
    """Return True if transformers' `Trainer.get_decay_parameter_names` includes the parameter."""
    return not in_layer_norm and not any(re.search(p, parameter.name.lower()) for p in _TRAINER_PATTERNS)


@dataclass(frozen=True)
class Framework:
    """Weight-decay rule of one framework.

    Attributes:
        name: name of the framework, with the version of the source if there is one
        rule: description of the rule
        decays: (parameter, whether it belongs to an nn.LayerNorm) -> whether it decays
    """

    name: str
    rule: str
    decays: Callable[[ModelParameter, bool], bool]


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
    """Treatment of one model's scale vectors by a framework.

    Attributes:
        framework: name of the framework
        rule: description of its rule
        input: (number of decaying input-side vectors, their total number)
        output: the same for output-side vectors
        policy: 'wd', 'iwd', 'owd' or 'nowd'; 'mixed' if vectors of one side differ; 'none' if there are none
    """

    framework: str
    rule: str
    input: tuple[int, int]
    output: tuple[int, int]
    policy: str


def framework_decay(model: nn.Module, roles: Roles) -> list[FrameworkDecay]:
    """Return which of the model's scale vectors decay under each framework's rule."""
    layer_norms = {path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    rows = []
    for framework in FRAMEWORKS:
        counts = {}
        for role in ("input", "output"):
            vectors = [p for p in roles.parameters if p.role == role and p.trained]
            decayed = [p for p in vectors if framework.decays(p, p.name.rpartition(".")[0] in layer_norms)]
            counts[role] = (len(decayed), len(vectors))
        rows.append(FrameworkDecay(framework.name, framework.rule, counts["input"], counts["output"], _policy(counts)))
    return rows


def _policy(counts: dict[str, tuple[int, int]]) -> str:
    present = {role for role, (_, total) in counts.items() if total}
    decayed = {role for role, (some, total) in counts.items() if some == total and total}
    if not present:
        return "none"
    if any(0 < some < total for some, total in counts.values()):
        return "mixed"
    # with one side only, several policies are equal
    same = [name for name in DECAYS if ScaleStrategy(decay=name).decayed_roles & present == decayed]
    return " = ".join(same)
