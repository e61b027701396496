"""Folding: a model without scale vectors that computes the same function (paper, Section 2.1)."""

import torch

from lightning_sv.nn import Backbone
from lightning_sv.scale import BranchGroup


@torch.no_grad()
def fold(model: Backbone) -> Backbone:
    """Return a `nop` backbone with W <- diag(gamma_out) W diag(gamma_in) and the same logits.

    Scale vectors around a matrix add no expressivity: this is that statement as code.

    Raises:
        ValueError: a branch normalizes its output (`dnp`), which no matrix can absorb.
    """
    groups = {path: m for path, m in model.named_modules() if isinstance(m, BranchGroup)}
    for path, group in groups.items():
        for name, branch in group.branches():
            if branch.norm_width is not None:
                raise ValueError(
                    f"{path}.{name} normalizes its output (strategy {str(model.strategy)!r}), so its scale "
                    "vectors cannot be folded into the matrix; fold models without 'dnp'."
                )
    weights = {name: value for name, value in model.state_dict().items() if name.endswith("weight")}
    for path, group in groups.items():
        for name, _ in group.branches():
            weights[f"{path}.{name}.weight"] = group.effective_weight(name)
    folded = Backbone(model.config, "nop").to(model.embed.weight)
    folded.load_state_dict(weights)
    return folded
