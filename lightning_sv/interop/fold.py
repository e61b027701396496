"""Folding: a model without scale vectors that computes the same function (paper, Section 2.1)."""

import torch

from lightning_sv.nn import Backbone
from lightning_sv.scale import BranchGroup, lone_norms


@torch.no_grad()
def fold(model: Backbone) -> Backbone:
    """Return a `nop` backbone with W <- diag(gamma_out) W diag(gamma_in) and the same logits.

    Scale vectors around a matrix add no expressivity: this is that statement as code.

    Raises:
        ValueError: a branch normalizes its output (`dnp`), or a norm that no matrix follows has a
            scale vector (Q/K-norm, Post-Norm): neither can be absorbed.
    """
    refuse_normalized_outputs(model)
    groups = {path: m for path, m in model.named_modules() if isinstance(m, BranchGroup)}
    for path, _ in lone_norms(model):
        raise ValueError(
            f"the scale vector of {path} cannot be folded into a matrix, for none follows it; fold models without "
            "qk_norm and post_norm."
        )
    plain = {name for name, _ in model.named_parameters() if name.endswith(".weight")}
    weights = {name: value for name, value in model.state_dict().items() if name in plain or name.endswith("_bias")}
    for path, group in groups.items():
        for name, _ in group.branches():
            weights[f"{path}.{name}.weight"] = group.effective_weight(name)
    folded = Backbone(model.config, "nop").to(model.embed.weight)
    folded.load_state_dict(weights)
    return folded


def refuse_normalized_outputs(model: Backbone) -> None:
    """Raise a ValueError where a branch normalizes its output, which no matrix can absorb."""
    for path, group in model.named_modules():
        if isinstance(group, BranchGroup):
            for name, branch in group.branches():
                if branch.norm_width is not None:
                    raise ValueError(
                        f"{path}.{name} normalizes its output (strategy {str(model.strategy)!r}), so its scale "
                        "vectors cannot be folded into the matrix; fold models without 'dnp'."
                    )
