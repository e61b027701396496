"""Norms of W, gamma and the effective W per branch (paper, Figure 4)."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.branches import BranchCallback, means_over_layers, scaled_branches
from lightning_sv.scale.definitions import effective_weight


@torch.no_grad()
def branch_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the norms of every branch of `model`, as scalar tensors keyed 'layer0/q_proj/W'.

    W: Frobenius norm of the weight; gamma_in, gamma_out: Euclidean norm over sqrt(width), so 1 at
    initialization; effective: Frobenius norm of diag(gamma_out) W diag(gamma_in) (paper, Section
    3.4). Under `dnp` the norm after W removes its length, so W and effective say nothing about the
    function; read gamma_out. The head's branch is keyed 'head/lm_head/...'. 'mean/q_proj/...'
    averages over layers. For experts, the mean is returned, plus
    'layer0/expert_up_proj/effective/expert3' for each. Norms without branches (Q/K-norm, Post-Norm)
    are keyed 'layer0/q_norm/gamma'.
    """
    out: dict[str, Tensor] = {}
    for branch in scaled_branches(model):
        if branch.weight is None:
            (gamma,) = branch.gammas().values()
            out[f"{branch.name}/gamma"] = gamma.square().mean().sqrt()
            continue
        for key, value in _norms(branch.full_weight(), branch.gammas()).items():
            out[f"{branch.name}/{key}"] = value
    return out | means_over_layers(out)


def _norms(weight: Tensor, gammas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of one branch; a leading axis of the weight counts experts."""
    scaled = effective_weight(weight, gammas.get("in"), gammas.get("out"))
    effective = torch.linalg.matrix_norm(scaled)  # (), or (n_expert,)
    norms = {"W": torch.linalg.matrix_norm(weight).mean(), "effective": effective.mean()}
    if effective.ndim:
        for expert, value in enumerate(effective):
            norms[f"effective/expert{expert}"] = value
    for side, gamma in gammas.items():
        norms[f"gamma_{side}"] = gamma.square().mean(-1).sqrt().mean()
    return norms


class BranchNorms(BranchCallback):
    """Log `branch_norms` under branch_norm/.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
        model: dotted name of the submodule with the scale vectors; null to find it

    Raises:
        ConfigError: every_n_steps is below 1
    """

    tag = "branch_norm"

    def __init__(self, every_n_steps: int = 50, model: str | None = None):
        super().__init__(every_n_steps, model)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the norms."""
        self.write(trainer, branch_norms(self._model))
