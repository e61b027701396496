"""What a `PretrainModule` does not support in any Trainer."""

from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.lit.fsdp import check_strategy
from lightning_sv.settings.trainer import REFUSED_EVERYWHERE, check_precision


def check_supported(module: Any) -> None:
    """Check callbacks, precision and strategy of a fit, before it changes anything.

    Raises:
        ConfigError: names the tool and what to use instead
    """
    trainer = module.trainer
    for callback in trainer.callbacks:
        names = [base.__name__ for base in type(callback).__mro__]
        refused = next((name for name in names if name in REFUSED_EVERYWHERE), None)
        if refused is not None:
            reason = REFUSED_EVERYWHERE[refused]
            raise ConfigError(f"a callback is {names[0]}; expected none, because it {reason}.")
    if trainer.gradient_clip_algorithm == "value":
        raise ConfigError("gradient_clip_algorithm is value; expected norm, as in the paper.")
    check_precision(trainer.precision)
    check_strategy(trainer.strategy)


def check_initial_weights(module: Any) -> None:
    """Check at the start of a fit that the weights of `init_from` were loaded.

    Not earlier: a resumed run has the weights of its checkpoint, and under FSDP2 they follow later.

    Raises:
        ConfigError: the module is in a Trainer that reads no `init_from`
    """
    start = module.settings.init_from
    is_resumed = module.trainer.ckpt_path is not None
    if start is not None and not module.has_loaded_weights and not is_resumed:
        raise ConfigError(
            f"init_from is {start}; expected None in your own Trainer. Use load_state_dict."
        )
