"""Metrics of the routers of a mixture of experts."""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_sv.callbacks.branches import place_of, unique_names, unique_place
from lightning_sv.callbacks.metric_accumulator import MetricAccumulator
from lightning_sv.callbacks.run_state import model_of, settings_of, was_skipped
from lightning_sv.errors import ConfigError
from lightning_sv.nn import MixtureOfExperts, Routing


class RouterMonitor(MetricAccumulator):
    """Log the routers under moe/.

    moe/layer0/load/expert3: tokens of the expert over those of an equal distribution, so 1 when
    balanced; load_max and load_min are the maximum and minimum of a block. balance_loss is 1 when
    balanced, and n_expert / n_expert_active when every token uses the same experts; entropy is in
    nats, log(n_expert) for uniform probabilities. Both are means over the micro-batches since the
    last write; load counts all their tokens. A dense `PretrainModule` writes nothing. If a custom
    module calls a mixture several times in a training_step, the last call counts.

    Args:
        every_n_steps: optimizer steps between two writes
        model: dotted name of the submodule with the mixtures; null to find them

    Raises:
        ConfigError: every_n_steps is below 1
    """

    tag = "moe"

    def __init__(self, every_n_steps: int = 50, model: str | None = None):
        super().__init__(every_n_steps, model)
        self._mixtures: dict[str, MixtureOfExperts] = {}
        #: routing of the last call in training mode, noted by hooks
        self._seen: dict[str, Routing] = {}
        self._hooks: list[RemovableHandle] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the mixtures of experts.

        Raises:
            ConfigError: a module other than `PretrainModule` has none
        """
        self._mixtures = _mixtures_by_name(model_of(pl_module, self.model))
        if not self._mixtures and settings_of(pl_module) is None:
            found = type(pl_module).__name__
            expected = "one with a MixtureOfExperts."
            raise ConfigError(f"the model of RouterMonitor is {found}; expected {expected}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add hooks to the experts of a custom module, which does not return its routings."""
        super().on_train_start(trainer, pl_module)
        if settings_of(pl_module) is None:
            self._watch()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._seen = {}

    def _watch(self) -> None:
        for name, module in self._mixtures.items():
            hook = module.register_forward_hook(partial(self._see, name))
            self._hooks.append(hook)

    def _see(self, name: str, module: MixtureOfExperts, args: Any, output: Any) -> None:
        """Forward hook: note the routing."""
        if module.training:
            self._seen[name] = output[1].detach()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Accumulate on the device; write every n optimizer steps, and at the last step."""
        routings = self._routings(outputs)
        if not routings:
            return
        n = len(batch) if isinstance(batch, Tensor) else 1
        is_due = self.add(_sums(routings, n), n, keep=not was_skipped(pl_module))
        if is_due:
            self.act(trainer, pl_module)

    def _routings(self, outputs: Any) -> list[Routing]:
        """Return the routing of each mixture, as a `PretrainModule` returns it, or from hooks."""
        returned = outputs.get("routings") if isinstance(outputs, dict) else None
        if returned is None:
            return self._seen_by_hooks()
        return list(returned)

    def _seen_by_hooks(self) -> list[Routing]:
        if not self._hooks:  # the training_step of a subclass; its first micro-batch is not counted
            self._watch()
        return [self._seen[name] for name in self._mixtures if name in self._seen]

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the means since the last write."""
        sums, n = self.take()
        if not n:  # every step was skipped
            return
        load = sums["load"] / sums["load"].mean(-1, keepdim=True)  # blocks, experts
        balance = sums["balance_loss"] / n  # blocks
        entropy = sums["entropy"] / n  # blocks
        scalars = {
            "mean/balance_loss": balance.mean().item(),
            "mean/entropy": entropy.mean().item(),
        }
        for number, name in enumerate(self._measured()):
            scalars |= _load_scalars(name, load[number].tolist())
            scalars[f"{name}/balance_loss"] = balance[number].item()
            scalars[f"{name}/entropy"] = entropy[number].item()
        self.write(trainer, scalars)

    def _measured(self) -> list[str]:
        """Return the names of the mixtures that have a routing, those in training mode."""
        if not self._hooks:  # a `PretrainModule` returns the routings of all
            return list(self._mixtures)
        return [name for name in self._mixtures if name in self._seen]


def _mixtures_by_name(model: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures by the name of their block; by a longer one if a block has several."""
    mixtures: dict[str, MixtureOfExperts] = {}
    short_names: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            name = unique_place(path)
            mixtures[name] = module
            short_names[name] = place_of(path)
    names = unique_names(short_names)
    return {names[name]: module for name, module in mixtures.items()}


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
