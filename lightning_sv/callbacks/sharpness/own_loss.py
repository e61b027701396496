"""A loss of the user, measured on the model that is trained."""

from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.run_state import evaluation_mode, model_of
from lightning_sv.callbacks.sharpness.measure import MeasuredLoss, Measurement
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets
from lightning_sv.errors import ConfigError
from lightning_sv.optim.groups import is_sharded

#: scalar loss of the LightningModule, which must not log, update metrics or change weights
Loss = Callable[[L.LightningModule], Tensor]


class OwnLoss(MeasuredLoss):
    """A function of the LightningModule.

    Args:
        measurement: what is measured, and how
        loss: the function
        model: dotted name of the submodule with the parameters; None for the module itself
    """

    def __init__(self, measurement: Measurement, loss: Loss, model: str | None):
        self.measurement = measurement
        self.loss = loss
        self.model = model

    def check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise ConfigError if the model is sharded."""
        if any(map(is_sharded, model_of(module, self.model).parameters())):
            hint = "Leave out loss to measure the held-out loss of a PretrainModule."
            raise ConfigError(
                f"the model of Sharpness is sharded; expected an unsharded one. {hint}"
            )

    def figures(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Measure in evaluation mode and float32; random states stay."""
        on_gpu = module.device.type == "cuda"
        devices = [module.device] if on_gpu else []
        subsets = parameter_subsets(model_of(module, self.model))
        with (
            evaluation_mode(module),
            torch.random.fork_rng(devices),
            torch.autocast(module.device.type, enabled=False),
        ):
            return self.measurement.figures(subsets, lambda: self.loss(module))
