"""Metrics of the routers of a mixture of experts."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.branches import place_of, unique_names
from lightning_sv.callbacks.metric_accumulator import MetricAccumulator, sequences_in
from lightning_sv.callbacks.run_state import model_of, settings_of
from lightning_sv.errors import ConfigError
from lightning_sv.nn import MixtureOfExperts, Routing


class RouterMonitor(MetricAccumulator):
    """Log the routers under moe/.

    moe/layer0/load/expert3: tokens of the expert over those of an equal distribution, so 1 when
    balanced; load_max and load_min are the maximum and minimum of a block. balance_loss is 1 when
    balanced, and n_expert / n_expert_active when every token uses the same experts; entropy is in
    nats, log(n_expert) for uniform probabilities. Both are means over the micro-batches since the
    last write; load counts all their tokens. A dense `PretrainModule` writes nothing. The
    training_step of a custom module returns {"loss": ..., "routings": [...]}, with the routing that
    each `MixtureOfExperts` returns, in the order of the blocks.

    Args:
        every_n_steps: optimizer steps between two writes
        model: dotted name of the submodule with the mixtures; null to find them

    Raises:
        ConfigError: every_n_steps is below 1
    """

    tag = "moe"

    def __init__(self, every_n_steps: int = 50, model: str | None = None):
        super().__init__(every_n_steps, model)
        self._names: list[str] = []  # of the blocks with a mixture, such as 'layer0'

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the mixtures of experts.

        Raises:
            ConfigError: a module other than `PretrainModule` has none
        """
        places = {}
        for path, submodule in model_of(pl_module, self.model).named_modules():
            if isinstance(submodule, MixtureOfExperts):
                places[path] = place_of(path)
        self._names = list(unique_names(places).values())
        if not self._names and settings_of(pl_module) is None:
            found = type(pl_module).__name__
            expected = "one with a MixtureOfExperts."
            raise ConfigError(f"the model of RouterMonitor is {found}; expected {expected}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Accumulate on the device; write every n optimizer steps, and at the last step."""
        routings = self._routings(outputs, pl_module)
        if not routings:
            return
        n = sequences_in(batch)
        is_due = self.add(_sums(routings, n), n)
        if is_due:
            self.act(trainer, pl_module)

    def _routings(self, outputs: Any, module: L.LightningModule) -> list[Routing]:
        """Return the routings in the result of a training_step.

        Raises:
            ConfigError: a custom module returns none, or not one per mixture
        """
        if not outputs:  # a training_step may return nothing
            return []
        if "routings" not in outputs and settings_of(module) is not None:
            return []  # a subclass of `PretrainModule` with its own training_step
        returned = outputs.get("routings", [])
        if len(returned) != len(self._names):
            expected = f"the routing of each of the {len(self._names)} mixtures of experts"
            hint = 'Return {"loss": loss, "routings": [...]}, or set model.'
            found = f"number of routings in the result of training_step is {len(returned)}"
            raise ConfigError(f"{found}; expected {expected}. {hint}")
        return [routing.detach() for routing in returned]

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the means since the last write."""
        sums, n = self.take()
        load = sums["load"] / sums["load"].mean(-1, keepdim=True)  # blocks, experts
        balance = sums["balance_loss"] / n  # blocks
        entropy = sums["entropy"] / n  # blocks
        scalars = {
            "mean/balance_loss": balance.mean().item(),
            "mean/entropy": entropy.mean().item(),
        }
        for number, name in enumerate(self._names):
            scalars |= _load_scalars(name, load[number].tolist())
            scalars[f"{name}/balance_loss"] = balance[number].item()
            scalars[f"{name}/entropy"] = entropy[number].item()
        self.write(trainer, scalars)


def _sums(routings: list[Routing], n: int) -> dict[str, Tensor]:
    """Return the figures of a micro-batch of n sequences, with a row per block."""
    balance_losses = [routing.balance_loss for routing in routings]
    entropies = [routing.entropy for routing in routings]
    return {
        "load": torch.stack([routing.load for routing in routings]),  # blocks, experts
        "balance_loss": torch.stack(balance_losses) * n,  # blocks
        "entropy": torch.stack(entropies) * n,  # blocks
    }


def _load_scalars(name: str, loads: list[float]) -> dict[str, float]:
    """Return the load of each expert of a block, with their extremes."""
    scalars = {f"{name}/load/expert{expert}": load for expert, load in enumerate(loads)}
    scalars[f"{name}/load_max"] = max(loads)
    scalars[f"{name}/load_min"] = min(loads)
    return scalars
