"""Balance of experts by their biases (router.balance is 'bias')."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sv.errors import ConfigError
from lightning_sv.nn import MixtureOfExperts, Routing


def with_total_loads(routings: Sequence[Routing]) -> tuple[list[Routing], Tensor | None]:
    """Add the tokens of each expert on all devices to the routings; a collective.

    Return the routings and these loads, (blocks, experts); None for a dense model.
    """
    if not routings:
        return [], None
    loads = torch.stack([routing.load for routing in routings])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(loads)  # the strategy's reduction would add a barrier
    pairs = zip(routings, loads, strict=True)
    return [routing._replace(total=total) for routing, total in pairs], loads


class ExpertBias(L.Callback):
    """Move the experts' biases in every step by its loads on all devices (arXiv:2408.15664).

    The bias moves just before the optimizer steps. It does not depend on the weights, and nothing
    reads it in between. A callback that calls `training_step` is not counted, because no backward
    pass follows.
    """

    def __init__(self) -> None:
        self._loads: Tensor | None = None  # (blocks, experts) tokens since the last step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget a step that an earlier fit did not finish."""
        self._loads = None

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        """Count the micro-batch towards the step.

        Raises:
            ConfigError: a `training_step` of a subclass does not count the tokens of the experts
        """
        loads = pl_module.expert_loads
        if loads is None:
            _check_no_biases(pl_module)
        else:
            self._loads = loads if self._loads is None else self._loads + loads

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: Any, optimizer: Optimizer
    ) -> None:
        """Move the biases."""
        loads = self._loads
        self._loads = None
        # A step without a backward pass has none, as that of the second of several optimizers.
        if loads is None:
            return
        for mixture, load in zip(_mixtures(pl_module), loads, strict=True):
            mixture.move_bias(load)


def _mixtures(module: Any) -> list[MixtureOfExperts]:
    return [each for each in module.net.modules() if isinstance(each, MixtureOfExperts)]


def _check_no_biases(module: Any) -> None:
    """Refuse a micro-batch without counted tokens if biases should move by them."""
    if module.settings.backbone.router.balance == "bias" and _mixtures(module):
        expected = "a training_step that calls self.training_loss(block)"
        why = "which counts the tokens of the experts"
        raise ConfigError(f"router.balance is bias; expected {expected}, {why}.")
