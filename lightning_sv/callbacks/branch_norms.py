"""Per-branch norms of W, gamma and the effective W: how Q, K and V move apart (paper, Figure 4)."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sv.callbacks.charts import Pages, chart_layout
from lightning_sv.callbacks.clock import StepClock
from lightning_sv.callbacks.scalars import write_scalars
from lightning_sv.callbacks.trained import TrainedModule
from lightning_sv.optim import gathered
from lightning_sv.scale import BranchGroup, output_norms
from lightning_sv.scale.fold import effective_weight


def branch_norms(model: nn.Module) -> dict[str, Tensor]:
    """Norms of every branch of `model`, as scalar tensors keyed 'layer0/q_proj/W'.

    W: Frobenius norm of the weight; gamma_in, gamma_out: Euclidean norm over sqrt(width), so 1 at
    initialization; effective: Frobenius norm of diag(gamma_out) W diag(gamma_in) (paper, Section
    3.4). The head's branch is keyed 'head/lm_head/...'. 'mean/q_proj/...' averages over layers.
    Of experts the mean is given, and 'layer0/expert_up_proj/effective/expert3' for each. Norms that
    feed no branch (Q/K-norm, Post-Norm) are keyed 'layer0/q_norm/gamma'.
    """
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, BranchGroup):
                for name in module.names:
                    out |= {f"{place_of(path)}/{name}/{key}": value for key, value in _norms(module, name).items()}
        for path, norm in output_norms(model):
            assert norm.scale is not None
            out[f"{place_of(path)}/{path.rpartition('.')[2]}/gamma"] = gathered(norm.scale()).square().mean().sqrt()
    return out | means_over_layers(out)


def place_of(path: str) -> str:
    """Return 'layer3' for a module inside the block of that number, else 'head'."""
    number = next((part for part in path.split(".") if part.isdigit()), None)
    return "head" if number is None else f"layer{number}"


def means_over_layers(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average 'layer0/q_proj/W', 'layer1/q_proj/W', ... as 'mean/q_proj/W'; keys of more parts are left out."""
    over_layers: dict[str, list[Tensor]] = defaultdict(list)
    for key, value in figures.items():
        if key.startswith("layer") and key.count("/") == 2:
            over_layers[key.partition("/")[2]].append(value)
    return {f"mean/{key}": torch.stack(values).mean() for key, values in over_layers.items()}


def _norms(group: BranchGroup, name: str) -> dict[str, Tensor]:
    """Return the norms of one branch; the last axes are its own, a leading one counts experts."""
    weight = gathered(getattr(group, name).weight)
    gamma_in, gamma_out = (None if gamma is None else gathered(gamma) for gamma in group.gammas(name))
    effective = torch.linalg.matrix_norm(effective_weight(weight, gamma_in, gamma_out))
    out = {"W": torch.linalg.matrix_norm(weight).mean(), "effective": effective.mean()}
    if effective.ndim:
        out |= {f"effective/expert{e}": value for e, value in enumerate(effective)}
    for side, gamma in (("gamma_in", gamma_in), ("gamma_out", gamma_out)):
        if gamma is not None:
            out[side] = gamma.square().mean(-1).sqrt().mean()
    return out


class BranchNorms(L.Callback):
    """Logs `branch_norms` under branch_norm/, with Q, K and V together in one TensorBoard chart.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written
    """

    def __init__(self, every_n_steps: int = 50):
        self._clock = StepClock("branch_norms.every_n_steps", every_n_steps)

    def charts(self, pl_module: TrainedModule) -> Pages:
        """Return a page for each group of branches."""
        return chart_layout(branch_norms(pl_module.net))

    def on_train_start(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Write the starting norms; a resumed run has written those of its step."""
        self._clock.start(trainer)
        if trainer.global_step == 0:
            self._write(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write every n optimizer steps, and at the last."""
        if self._clock.ended(trainer) and self._clock.is_due(trainer, trainer.global_step):
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        norms = branch_norms(pl_module.net)
        values = torch.stack(list(norms.values())).tolist()  # one transfer from the device
        write_scalars(trainer, {f"branch_norm/{k}": v for k, v in zip(norms, values, strict=True)})
