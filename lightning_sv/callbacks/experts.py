"""What the routers of a mixture of experts do: load, balance loss, entropy, dropped tokens."""

from typing import Any

import lightning as L
import torch

from lightning_sv.callbacks.charts import Pages
from lightning_sv.callbacks.scalars import write_scalars
from lightning_sv.callbacks.trained import TrainedModule
from lightning_sv.callbacks.window import Window
from lightning_sv.nn import MixtureOfExperts


class Experts(Window):
    """Logs the routers under moe/, with the load of every expert of a block in one TensorBoard chart.

    moe/layer0/load/expert3: tokens that the expert received over those of an equal share, so 1 when
    balanced; load_max and load_min are the largest and smallest of a block. balance_loss is 1 when
    balanced and n_expert when collapsed; entropy is in nats, log(n_expert) when the router does not
    choose; both are means over the micro-batches since the last write, load is of all their tokens.
    dropped counts assignments in that window that no expert received: 0, for none is dropped. A
    dense model writes nothing.

    Args:
        every_n_steps: optimizer steps between two writes
    """

    def __init__(self, every_n_steps: int = 50):
        super().__init__("experts", every_n_steps)

    def charts(self, pl_module: TrainedModule) -> Pages:
        """Return the load of every expert, a chart a block; nothing for a dense model."""
        loads = {
            f"layer{i}": ["Multiline", [f"moe/layer{i}/load/expert.*"]]
            for i, layer in enumerate(pl_module.net.layers)
            if isinstance(layer.ffn, MixtureOfExperts)
        }
        return {"expert load": loads} if loads else {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Accumulate on the device; write every n optimizer steps, and at the last."""
        routings = outputs["routings"]
        if not routings:
            return
        expected = batch[:, 1:].numel() * pl_module.config.n_expert_active
        values = {
            "load": torch.stack([r.load for r in routings]),
            "dropped": expected - torch.stack([r.load.sum() for r in routings]),
            "balance_loss": torch.stack([r.balance_loss for r in routings]) * len(batch),
            "entropy": torch.stack([r.entropy for r in routings]) * len(batch),
        }
        if self.add(values, len(batch), keep=not pl_module.nonfinite.skipped_now):
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        sums, n = self.take()
        if not n:  # every step was skipped
            return
        mean = {key: value if key in ("load", "dropped") else value / n for key, value in sums.items()}
        load = mean["load"] / mean["load"].mean(-1, keepdim=True)
        scalars: dict[str, float] = {}
        for i, row in enumerate(load.tolist()):
            scalars |= {f"moe/layer{i}/load/expert{e}": value for e, value in enumerate(row)}
            scalars |= {f"moe/layer{i}/load_max": max(row), f"moe/layer{i}/load_min": min(row)}
            for key in ("balance_loss", "entropy", "dropped"):
                scalars[f"moe/layer{i}/{key}"] = float(mean[key][i])
        for key in ("balance_loss", "entropy", "dropped"):
            scalars[f"moe/mean/{key}"] = float(mean[key].mean())
        write_scalars(trainer, scalars)
