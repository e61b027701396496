"""Model, settings and data of a run, which callbacks read in any Trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import lightning as L
from torch import nn

from lightning_sv.errors import ConfigError
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
    if settings_of(module) is None:
        return module
    backbone: nn.Module | None = getattr(module, "backbone", None)
    if backbone is None:  # it is not built yet
        return module
    return backbone


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
    if isinstance(settings, PretrainConfig):
        return settings
    return None


def data_of(trainer: L.Trainer) -> DataConfig | None:
    """Return the settings of a `TokenDataModule`; None for other data."""
    module = getattr(trainer, "datamodule", None)
    settings = getattr(module, "settings", None)
    if isinstance(settings, DataConfig):
        return settings
    return None


def callbacks_of(trainer: L.Trainer, kind: type[_C]) -> list[_C]:
    """Return the Trainer's callbacks of a class."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def is_fitting(trainer: L.Trainer) -> bool:
    """Return True in a fit, but not in a validation before its first step."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def has_known_model(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return True for a `PretrainModule` with its own backbone that reads a `TokenDataModule`."""
    if settings_of(module) is None or data_of(trainer) is None:
        return False
    return getattr(module, "built_by", None) is None


def tokens_seen(trainer: L.Trainer) -> int:
    """Return the number of training tokens so far; the data must be a `TokenDataModule`."""
    data = data_of(trainer)
    assert data is not None
    return trainer.global_step * data.tokens_per_step
