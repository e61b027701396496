"""What a `PretrainModule` does not support in any Trainer."""

from typing import Any

from lightning_sv.errors import ConfigError
from lightning_sv.lit.fsdp import check_strategy
from lightning_sv.settings.trainer import REFUSED_EVERYWHERE, check_precision


def check_supported(module: Any) -> None:
    """Check callbacks, precision, strategy and initial weights of a fit, before it changes anything.

    Raises:
        ConfigError: names the tool and what to use instead
    """
    trainer = module.trainer
    for callback in trainer.callbacks:
        names = [base.__name__ for base in type(callback).__mro__]
        refused = next((name for name in names if name in REFUSED_EVERYWHERE), None)
        if refused is not None:
            raise ConfigError(f"a callback is {names[0]}; expected none, because it {REFUSED_EVERYWHERE[refused]}.")
    check_precision(trainer.precision)
    check_strategy(trainer.strategy)
    start = module.settings.init_from
    if start is not None and not module.has_loaded_weights and trainer.ckpt_path is None:
        raise ConfigError(f"init_from is {start}; expected None in your own Trainer. Use load_state_dict.")
