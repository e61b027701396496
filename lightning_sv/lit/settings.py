"""What a checkpoint must share with the run that loads it."""

from dataclasses import asdict
from typing import Any

from lightning_sv.lit.load import CHECKPOINT_KEY


def settings_of(module: Any) -> dict[str, Any]:
    """Return the settings of a `PretrainModule` and its data that weights, optimizer state and order depend on."""
    data: Any = module.trainer.datamodule
    return {
        "backbone": asdict(module.config),
        "scale": str(module.strategy),
        "scale_options": asdict(module.scale_options),
        "mask_documents": module.mask_documents,
        "optim": asdict(module.optim) | {"lr": module.lr},
        "schedule": asdict(module.schedule),
        "data": {"seq_len": data.seq_len, "global_batch": data.global_batch},
    }


def refuse_other(checkpoint: dict[str, Any], here: dict[str, Any], *, training: bool) -> None:
    """Refuse to load under other settings: the checkpoint's weights or optimizer state would silently win over them.

    Args:
        checkpoint: as loaded.
        here: the settings of this run, see `settings_of`.
        training: whether optimizer, schedule and batch count as well.

    Raises:
        ValueError: names the first key that differs, and both values.
    """
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):
        raise ValueError(f"the checkpoint was not written by lightning_sv: it has no {CHECKPOINT_KEY!r} entry.")
    keys: tuple[str, ...] = ("backbone", "scale", "scale_options", "mask_documents")
    if training:
        keys = (*keys, "optim", "schedule", "data")
    for key in keys:
        where, then, now = _first_difference(key, saved.get(key), here[key])
        if then != now:
            raise ValueError(
                f"the checkpoint was trained with {where} = {then}, this run has {now}; resume with the same "
                "settings, or start a new run."
            )


def _first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values where two settings first differ; the values are equal if they do not."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *then]):
            if then.get(name) != now.get(name):
                return _first_difference(f"{key}.{name}", then.get(name), now.get(name))
    return key, then, now
