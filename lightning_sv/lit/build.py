"""Small parts of `PretrainModule`: configs from dictionaries, the schedule of an optimizer."""

import logging
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_sv.optim import ScheduleConfig

log = logging.getLogger(__name__)


def config_from(kind: type, value: Any) -> Any:
    """Return a config from its fields, which load_from_checkpoint passes.

    With hparams_file, they are a mapping of omegaconf.
    """
    if isinstance(value, Mapping) and not isinstance(value, dict):
        # imported here, because a module needs it for such a file only
        from omegaconf import (
            OmegaConf,
        )

        value = OmegaConf.to_container(value)
    return kind(**value) if isinstance(value, dict) else value


def warn_untrained(module: L.LightningModule, optimizer: Optimizer) -> None:
    """Warn about the first trained parameter that the optimizer lacks."""
    known = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in known:
            log.warning(
                "%s is not trained, because the optimizer lacks it; override configure_optimizers",
                name,
            )
            return


def learning_rate_schedule(
    optimizer: Optimizer, schedule: ScheduleConfig, steps: int, done: int
) -> LambdaLR:
    """Return the schedule over `steps` steps, of which `done` were taken in earlier fits."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # LambdaLR needs it to continue
    factor = partial(_rate_factor, schedule=schedule, steps=steps)
    return LambdaLR(optimizer, factor, last_epoch=done - 1)


def _rate_factor(step: int, *, schedule: ScheduleConfig, steps: int) -> float:
    return schedule.factor(min(step, steps - 1), steps)
