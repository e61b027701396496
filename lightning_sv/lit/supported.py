"""What a `PretrainModule` does not support in any Trainer."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_sv.errors import ConfigError
from lightning_sv.lit.clipping import check_clipped_roles
from lightning_sv.lit.fsdp import check_strategy
from lightning_sv.nn.attention_kernels import check_backend
from lightning_sv.settings.trainer import REFUSED_EVERYWHERE, check_precision

#: trainer.precision -> dtype of products, if it is not float32
PRODUCTS = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


def check_supported(module: Any) -> None:
    """Check callbacks, precision and strategy of a fit, before it changes anything.

    Raises:
        ConfigError: names the tool and what to use instead
    """
    trainer = module.trainer
    for callback in trainer.callbacks:
        _check_callback(type(callback))
        if trainer.world_size > 1:
            _check_no_save_on_exception(callback)
    if trainer.gradient_clip_algorithm == "value":
        raise ConfigError("gradient_clip_algorithm is value; expected norm, as in the paper.")
    check_precision(trainer.precision)
    check_strategy(trainer.strategy)


def _check_callback(kind: type) -> None:
    for base in kind.__mro__:
        reason = REFUSED_EVERYWHERE.get(base.__name__)
        if reason is not None:
            raise ConfigError(f"a callback is {kind.__name__}; expected none, because it {reason}.")


def _check_no_save_on_exception(callback: L.Callback) -> None:
    """Refuse a callback whose save is a collective that the other ranks do not join."""
    saves = isinstance(callback, OnExceptionCheckpoint)
    if isinstance(callback, ModelCheckpoint):
        saves = callback.save_on_exception
    if not saves:
        return
    found = f"a callback is {type(callback).__name__}, which saves on an exception"
    expected = "none on several devices, because a rank that fails would wait for the others"
    raise ConfigError(f"{found}; expected {expected}.")


class StartCheck(L.Callback):
    """Check a module at the start of a fit, when its weights and device are known.

    It is a callback, because a subclass may replace the module's `on_fit_start`.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Check the initial weights, the kernel of attention and the roles that are clipped.

        Raises:
            ConfigError: the weights of `init_from` were not loaded, the device lacks the kernel of
                `attention_backend`, or no optimizer has a role of `clip_by_role`
        """
        _check_initial_weights(pl_module)
        _check_attention_backend(pl_module)
        check_clipped_roles(pl_module)


def _check_initial_weights(module: Any) -> None:
    """Check that the weights of `init_from` were loaded, which not every Trainer does.

    Not earlier: a resumed run has the weights of its checkpoint, and under FSDP2 they follow later.

    Raises:
        ConfigError: they were not, and no checkpoint is resumed
    """
    start = module.settings.init_from
    is_resumed = module.trainer.ckpt_path is not None
    if start is not None and not module.has_loaded_weights and not is_resumed:
        raise ConfigError(
            f"init_from is {start}; expected None in your own Trainer. "
            "Call load_state_dict before trainer.fit."
        )


def _check_attention_backend(module: Any) -> None:
    """Check that the device has the kernel for the model's head width, precision and mask."""
    settings = module.settings
    trainer = module.trainer
    has_mask = settings.mask_documents and settings.compile == "none"
    check_backend(
        settings.attention_backend,
        trainer.strategy.root_device,
        PRODUCTS.get(str(trainer.precision), torch.float32),
        settings.backbone.head_width,
        masked=has_mask,
    )
