"""Per-branch norms of W, gamma and the effective W: how Q, K and V move apart (paper, Figure 4)."""

from collections import defaultdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_sv.callbacks.scalars import write_scalars
from lightning_sv.scale import BranchGroup


def branch_norms(model: nn.Module) -> dict[str, Tensor]:
    """Norms of every branch of `model`, as scalar tensors keyed 'layer0/q_proj/W'.

    W: Frobenius norm of the weight; gamma_in, gamma_out: Euclidean norm over sqrt(width), so 1 at
    initialization; effective: Frobenius norm of diag(gamma_out) W diag(gamma_in) (paper, Section
    3.4). The head's branch is keyed 'head/lm_head/...'. 'mean/q_proj/...' averages over layers.
    """
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for path, group in model.named_modules():
            if not isinstance(group, BranchGroup):
                continue
            parts = path.split(".")
            where = f"layer{parts[parts.index('layers') + 1]}" if "layers" in parts else "head"
            for name, branch in group.branches():
                gamma_in, gamma_out = group.gammas(name)
                key = f"{where}/{name}"
                out[f"{key}/W"] = branch.weight.norm()
                out[f"{key}/effective"] = group.effective_weight(name).norm()
                for side, gamma in (("gamma_in", gamma_in), ("gamma_out", gamma_out)):
                    if gamma is not None:
                        out[f"{key}/{side}"] = gamma.square().mean().sqrt()
    over_layers: dict[str, list[Tensor]] = defaultdict(list)
    for key, value in out.items():
        if key.startswith("layer"):
            over_layers[key.partition("/")[2]].append(value)
    out |= {f"mean/{key}": torch.stack(values).mean() for key, values in over_layers.items()}
    return out


class BranchNorms(L.Callback):
    """Logs `branch_norms` under branch_norm/, with Q, K and V together in one TensorBoard chart.

    Args:
        every_n_steps: optimizer steps between two writes; step 0 is always written.
    """

    def __init__(self, every_n_steps: int = 50):
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; it must be at least 1.")
        self.every = every_n_steps
        self._written = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Lay the charts out and write the starting norms."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(chart_layout(pl_module.net))
        self._write(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write every n optimizer steps, and at the last."""
        if trainer.global_step % self.every == 0 or trainer.global_step >= trainer.max_steps:
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self._written:  # between the micro-batches of one step
            return
        self._written = trainer.global_step
        norms = branch_norms(pl_module.net)
        values = torch.stack(list(norms.values())).tolist()  # one transfer from the device
        write_scalars(trainer, {f"branch_norm/{k}": v for k, v in zip(norms, values, strict=True)})


def chart_layout(model: nn.Module) -> dict[str, dict[str, list[Any]]]:
    """Return TensorBoard's custom-scalar layout: one chart a layer and kind, a line a branch."""
    charts: dict[str, dict[str, list[Any]]] = {}
    norms = branch_norms(model)
    for group, members in (("Q, K, V", ("q_proj", "k_proj", "v_proj")), ("gate, up", ("gate_proj", "up_proj"))):
        page: dict[str, list[Any]] = {}
        places = dict.fromkeys(key.split("/")[0] for key in norms if key.split("/")[1] in members)
        for place in sorted(places, key=lambda p: (p != "mean", len(p), p)):
            for kind in ("effective", "W", "gamma_in", "gamma_out"):
                tags = [f"branch_norm/{place}/{m}/{kind}" for m in members if f"{place}/{m}/{kind}" in norms]
                if tags:
                    page[f"{kind}, {place}"] = ["Multiline", tags]
        charts[group] = page
    return charts
