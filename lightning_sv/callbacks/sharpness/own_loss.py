"""A loss of the user, measured on the model that is trained, which is left as it was."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sv.callbacks.run_state import evaluation_mode, model_of
from lightning_sv.callbacks.sharpness.measure import MeasuredLoss, Measurement
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets
from lightning_sv.errors import ConfigError
from lightning_sv.optim.groups import is_sharded

#: a loss of the LightningModule; like a training_step it may return a dictionary
Loss = Callable[[L.LightningModule], Tensor | Mapping[str, Any] | None]


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
        """Measure without an effect on the module."""
        on_gpu = module.device.type == "cuda"
        devices = [module.device] if on_gpu else []
        subsets = parameter_subsets(model_of(module, self.model))
        loss = partial(self._loss_of, module)
        with (
            evaluation_mode(module),
            metrics_kept(module),
            # a training_step would log this loss
            patch.object(module, "log", lambda *args, **kwargs: None),
            torch.random.fork_rng(devices),
            torch.autocast(module.device.type, enabled=False),
        ):
            return self.measurement.figures(subsets, loss)

    def _loss_of(self, module: L.LightningModule) -> Any:
        """Return the loss; raise ConfigError if its computation changes the weights."""
        before = _versions(module)
        value: Any = self.loss(module)
        if _versions(module) != before:
            expected = "one without optimizer steps"
            hint = "In manual optimization, compute it without training_step."
            raise ConfigError(
                "loss of Sharpness is a function that changes the weights; "
                f"expected {expected}. {hint}"
            )
        return value.get("loss") if isinstance(value, Mapping) else value


def _versions(module: nn.Module) -> list[int]:
    """Return how often each parameter was changed."""
    return [parameter._version for parameter in module.parameters()]


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Leave the metrics of `module` as they are, although a training_step inside updates them."""
    kept: dict[Metric, dict[str, Any]] = {}
    for metric in module.modules():
        if isinstance(metric, Metric):
            kept[metric] = dict(vars(metric))
            # an update may change the states in place, so that it gets copies
            vars(metric).update(metric._copy_state_dict())
    try:
        yield
    finally:
        for metric, values in kept.items():
            vars(metric).update(values)
