"""Trainer settings that are derived from others here, or that would spoil a run."""

from typing import Any

#: where a run differs from Lightning's own defaults
TRAINER_DEFAULTS: dict[str, Any] = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
#: trainer key -> (the values it may have, what to do instead)
DERIVED = {
    "accumulate_grad_batches": ((1, None), "set data.global_batch and data.micro_batch instead"),
    "val_check_interval": ((1.0, None), "set data.validations instead"),
    "limit_val_batches": ((1.0, None), "set data.val_sequences instead"),
    "check_val_every_n_epoch": ((None,), "set data.validations instead"),
    "gradient_clip_algorithm": (
        (None, "norm"),
        "the paper clips by the global norm, trainer.gradient_clip_val",
    ),
    "use_distributed_sampler": ((False,), "every device reads its share of the global batch without it"),
    "max_epochs": ((None, -1), "set trainer.max_steps or model.tokens_per_param instead"),
    "max_time": ((None,), "set trainer.max_steps or model.tokens_per_param instead"),
}


def refuse_trainer_keys(given: Any) -> None:
    """Refuse what would be overwritten or would end a run without its last validation.

    Args:
        given: the trainer's section of the config.

    Raises:
        ValueError: names the key and what to do instead.
    """
    for key, (accepted, instead) in DERIVED.items():
        if given[key] not in accepted:
            raise ValueError(f"trainer.{key} {given[key]} is derived here and must not be set; {instead}.")
    if given["max_steps"] != -1 and given["max_steps"] < 1:
        raise ValueError(f"trainer.max_steps is {given['max_steps']}; it must be at least 1, or -1 for the budget.")
    if str(given["precision"]) in ("bf16-true", "16-true", "16-mixed", "16", "bf16"):
        raise ValueError(
            f"trainer.precision {given['precision']} is not supported: half-precision weights round changes of a scale "
            "vector near 1 away, and fp16 needs loss scaling; use bf16-mixed or 32-true."
        )
