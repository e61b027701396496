"""State of a run that callbacks read, and the steps at which they act, for any module and data."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_sv.errors import ConfigError, expect
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig

_C = TypeVar("_C", bound=L.Callback)


def model_of(module: L.LightningModule, name: str | None = None) -> nn.Module:
    """Return the submodule of this dotted name; without a name our backbone, or the module."""
    if name is None:
        return _default_model(module)
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = dict(module.named_children())
        expected = f"a submodule of {type(module).__name__}: {' '.join(names)}"
        raise ConfigError(f"model is {name!r}; expected {expected}.") from None


def _default_model(module: L.LightningModule) -> nn.Module:
    backbone: nn.Module | None = None
    if settings_of(module) is not None:
        backbone = getattr(module, "backbone", None)
    return module if backbone is None else backbone


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; afterwards give every submodule the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def settings_of(module: L.LightningModule) -> PretrainConfig | None:
    """Return the settings of a `PretrainModule`; None for any other class."""
    settings = getattr(module, "settings", None)
    return settings if isinstance(settings, PretrainConfig) else None


def data_of(trainer: L.Trainer) -> DataConfig | None:
    """Return the settings of a `TokenDataModule`; None for other data."""
    module = getattr(trainer, "datamodule", None)
    settings = getattr(module, "settings", None)
    return settings if isinstance(settings, DataConfig) else None


def callbacks_of(trainer: L.Trainer, kind: type[_C]) -> list[_C]:
    """Return the Trainer's callbacks of a class."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def is_fitting(trainer: L.Trainer) -> bool:
    """Return True in a fit, but not in a validation before its first step."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def has_known_model(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return True for a `PretrainModule` with its own backbone that reads a `TokenDataModule`."""
    is_ours = settings_of(module) is not None and data_of(trainer) is not None
    return is_ours and getattr(module, "built_by", None) is None


def tokens_seen(trainer: L.Trainer) -> int:
    """Return the number of training tokens so far; the data must be a `TokenDataModule`."""
    data = data_of(trainer)
    assert data is not None
    return trainer.global_step * data.tokens_per_step


def total_steps(trainer: L.Trainer) -> int | None:
    """Return the number of optimizer steps of the run; None if it is not known.

    It is not if only `max_time` ends the run. Without `max_steps` it is also not known if several
    optimizers step, or a callback changes the accumulation, which Lightning's number ignores.
    """
    has_limit = trainer.max_steps >= 0
    if not has_limit and _steps_vary(trainer):
        return None
    total = trainer.estimated_stepping_batches
    is_known = math.isfinite(total) and total >= 0
    return int(total) if is_known else None


def _steps_vary(trainer: L.Trainer) -> bool:
    """Return True if the batches of an epoch do not tell its optimizer steps."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return bool(schedulers) or len(trainer.optimizers) > 1


def is_at_end(trainer: L.Trainer) -> bool:
    """Return True after the last step of the run; False if the number of its steps is not known."""
    total = total_steps(trainer)
    return total is not None and trainer.global_step >= total


def known_steps(trainer: L.Trainer, callback: str) -> int:
    """Return the number of optimizer steps of the run, which `callback` needs.

    Raises:
        ConfigError: only time ends the run
    """
    total = total_steps(trainer)
    if total is None:
        expected = f"a number of steps, which {callback} needs"
        raise ConfigError(f"max_steps is {trainer.max_steps}; expected {expected}.")
    return total


def log_spaced(total: int, n: int) -> list[int]:
    """Return at most n steps: 0, and geometrically spaced steps from 1% of the run to its end.

    >>> log_spaced(1000, 5)
    [0, 10, 46, 215, 1000]
    """
    if n < 3:
        return [0, total]
    first = max(1.0, total / 100)
    ratio = total / first
    steps = {round(first * ratio ** (i / (n - 2))) for i in range(n - 1)}
    return sorted({0, *steps})


def validates_now(trainer: L.Trainer) -> bool:
    """Return True if a validation follows the current step."""
    if not trainer.enable_validation:
        return False
    if trainer.global_step >= trainer.max_steps > 0:
        return True
    every: Any = trainer.val_check_batch
    if every is None or not math.isfinite(every):
        return False
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return batches % every == 0


class StepTrigger:
    """Count optimizer steps for a callback that Lightning calls after every micro-batch.

    The callback acts after every n-th step, after chosen steps, and after the last one. A batch may
    complete several steps, and then any of them can be due.

    Args:
        key: name of `every_n_steps` in the config
        every_n_steps: optimizer steps between two acts; None for chosen steps only

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, key: str, every_n_steps: int | None = None):
        if every_n_steps is not None:
            expect(every_n_steps >= 1, key, every_n_steps, "at least 1.")
        self.every = every_n_steps
        self.chosen: frozenset[int] = frozenset()
        #: last completed step
        self.step = 0
        #: last step of the batch before: the last batch completed all steps after it, up to `step`
        self.previous = -1
        #: last step of the run; None if it ends by time only
        self.last: int | None = None

    def start(self, trainer: L.Trainer, chosen: Collection[int] = ()) -> None:
        """Set the first step of a new or resumed run, and the chosen steps."""
        self.step = trainer.global_step
        self.previous = trainer.global_step - 1
        self.last = total_steps(trainer)
        self.chosen = frozenset(chosen)
        if self.last is not None:
            self.chosen |= {self.last}

    def ended(self, trainer: L.Trainer) -> bool:
        """Return True if the last micro-batch completed a step; True once per step."""
        if trainer.global_step == self.step:
            return False
        self.previous = self.step
        self.step = trainer.global_step
        return True

    def is_due(self, step: int) -> bool:
        """Return True if the callback acts after this step, the last completed one or a later."""
        previous = self.previous if step == self.step else step - 1
        if any(previous < chosen <= step for chosen in self.chosen):
            return True
        return self.every is not None and step // self.every > previous // self.every

    def is_at_end(self) -> bool:
        """Return True if the last step of the run is completed."""
        return self.last is not None and self.step >= self.last
