"""Arguments of our modules as configs, and the schedule of an optimizer."""

import logging
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_sv.callbacks.steps import total_steps
from lightning_sv.corpus import CorpusConfig, Manifest, local_folder
from lightning_sv.errors import expect_fields
from lightning_sv.optim import ScheduleConfig

log = logging.getLogger(__name__)


def config_from(kind: Any, value: Any) -> Any:
    """Return a config from its fields, which load_from_checkpoint passes.

    With hparams_file, they are a mapping of omegaconf.
    """
    if isinstance(value, Mapping) and not isinstance(value, dict):
        from omegaconf import OmegaConf  # here, because a module needs it for such a file only

        value = OmegaConf.to_container(value)
    if not isinstance(value, dict):
        return value
    expect_fields(kind, value)
    return kind(**value)


def corpus_from(value: CorpusConfig | str | Path | dict[str, Any]) -> CorpusConfig:
    """Return the config of a corpus: given, from its fields, or of a prepared folder."""
    if isinstance(value, CorpusConfig):
        return value
    if isinstance(value, Mapping):
        fields: CorpusConfig = config_from(CorpusConfig, value)
        return fields
    tokenizer = Manifest.load(local_folder(value)).tokenizer
    return CorpusConfig(dir=str(value), tokenizer=tokenizer)


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


def with_schedule(optimizer: Optimizer, schedule: ScheduleConfig, trainer: L.Trainer) -> Any:
    """Return an optimizer with its schedule over the Trainer's steps, as Lightning expects them.

    The rate stays at its peak if the number of steps is not known.
    """
    steps = total_steps(trainer)
    if steps is None:
        log.warning("the number of steps is not known: the learning rate stays at its peak")
        return optimizer
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # LambdaLR needs it to continue
    done = 0 if trainer.ckpt_path else trainer.global_step  # in earlier fits
    factor = partial(_rate_factor, schedule=schedule, steps=steps)
    scheduler = LambdaLR(optimizer, factor, last_epoch=done - 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _rate_factor(step: int, *, schedule: ScheduleConfig, steps: int) -> float:
    return schedule.factor(min(step, steps - 1), steps)
