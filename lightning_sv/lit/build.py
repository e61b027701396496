"""The parts of `PretrainModule` that are built before training: backbone and schedule."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_sv.errors import ConfigError
from lightning_sv.lit.fsdp import check_strategy, shard
from lightning_sv.lit.init_from import Start
from lightning_sv.nn import Backbone
from lightning_sv.optim import ScheduleConfig
from lightning_sv.settings.model import PretrainConfig

log = logging.getLogger(__name__)


def config_from(kind: type, value: Any) -> Any:
    """Return a config from its fields: load_from_checkpoint passes a dictionary, with hparams_file omegaconf's."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        from omegaconf import OmegaConf  # imported here, because a module needs it for such a file only

        value = OmegaConf.to_container(value)
    return kind(**value) if isinstance(value, dict) else value


def build_backbone(settings: PretrainConfig, seed: int, start: Start | None, *, on_meta: bool) -> Backbone:
    """Build the backbone with initialized weights or those of `start`; if `on_meta`, without weights."""
    device = torch.device("meta") if on_meta else nullcontext()
    # Tensors of inference mode could not be trained later.
    with torch.inference_mode(False), device:
        backbone = Backbone(settings.backbone, settings.strategy, settings.scale_options, seed=seed)
    if start is not None:
        start.load(backbone)
    backbone.activation_checkpointing = settings.activation_checkpointing
    backbone.narrow_residual = settings.residual == "narrow"
    return backbone


def shard_backbone(backbone: Backbone, trainer: L.Trainer, seed: int, compile_mode: str) -> None:
    """Shard the backbone over the devices of the Trainer's strategy, and initialize one without weights."""
    if compile_mode == "model":
        raise ConfigError("compile is model; expected block or none for a sharded model.")
    strategy: Any = trainer.strategy
    check_strategy(strategy)
    seed = strategy.broadcast(seed)  # without a seed each rank has its own
    shard(backbone, strategy.mesh, strategy.root_device, seed=seed, keep_gathered=strategy.keep_gathered)


def warn_untrained(module: L.LightningModule, optimizer: Optimizer) -> None:
    """Warn about the first trained parameter that the optimizer lacks, for instance of a subclass."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in known:
            log.warning("%s is not trained, because the optimizer lacks it; override configure_optimizers", name)
            return


def learning_rate_schedule(optimizer: Optimizer, schedule: ScheduleConfig, steps: int, done: int) -> LambdaLR:
    """Return the schedule over `steps` steps, of which `done` were taken in earlier fits."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # LambdaLR needs it to continue
    factor = partial(_rate_factor, schedule=schedule, steps=steps)
    return LambdaLR(optimizer, factor, last_epoch=done - 1)


def _rate_factor(step: int, *, schedule: ScheduleConfig, steps: int) -> float:
    return schedule.factor(min(step, steps - 1), steps)
