"""What a checkpoint must share with the run that loads it."""

from dataclasses import asdict
from math import isfinite
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_sv.lit.load import CHECKPOINT_KEY
from lightning_sv.optim import OptimConfig, build_optimizer

#: settings that came after the first checkpoints, which had what is their default now
_LATER = ("undecayed", "muon_roles")


def settings_of(module: Any) -> dict[str, Any]:
    """Return the settings of a `PretrainModule` and its data that weights, optimizer state and order depend on."""
    data: Any = module.trainer.datamodule
    return {
        "backbone": asdict(module.config),
        "scale": str(module.strategy),
        "scale_options": asdict(module.scale_options),
        "mask_documents": module.mask_documents,
        "tokenizer_sha256": data.manifest.tokenizer_sha256,
        "optim": asdict(module.optim) | {"lr": module.lr},
        "schedule": asdict(module.schedule),
        "data": {"seq_len": data.seq_len, "global_batch": data.global_batch},
    }


def refuse_other(checkpoint: dict[str, Any], module: Any) -> None:
    """Refuse to load under other settings: the checkpoint's weights or optimizer state would silently win over them.

    Args:
        checkpoint: as loaded.
        module: the `PretrainModule`; where it trains, optimizer, schedule and batch count as well.

    Raises:
        ValueError: names the first key that differs, and both values; or the optimizer state is damaged.
    """
    here, training = settings_of(module), module.trainer.state.fn == "fit"
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):
        raise ValueError(f"the checkpoint was not written by lightning_sv: it has no {CHECKPOINT_KEY!r} entry.")
    keys: tuple[str, ...] = ("backbone", "scale", "scale_options", "mask_documents", "tokenizer_sha256")
    if training:
        keys = (*keys, "optim", "schedule", "data")
    if isinstance(saved.get("optim"), dict):
        default = asdict(OptimConfig())
        saved = saved | {"optim": {key: default[key] for key in _LATER} | saved["optim"]}
    for key in keys:
        where, then, now = _first_difference(key, saved.get(key), here[key])
        if then != now:
            raise ValueError(
                f"the checkpoint was trained with {where} = {then}, this run has {now}; resume with the same "
                "settings, or start a new run."
            )
    if training:
        _refuse_damaged(checkpoint, build_optimizer(module.parameter_groups(module.meta()), module.optim, module.lr))


def _refuse_damaged(checkpoint: dict[str, Any], optimizer: Optimizer) -> None:
    """Refuse groups and states other than those of `optimizer`, but for the scheduled rate.

    Torch would load them; a state of another shape makes a fused step write past its end.
    """
    own = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        (saved,) = checkpoint["optimizer_states"]
        numbers = [group["params"] for group in saved["param_groups"]]
        if numbers != [group["params"] for group in own]:
            raise ValueError("its parameters are numbered otherwise")
        # loading adds what an older torch did not have, and nothing else
        optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        for here, group in zip(own, optimizer.state_dict()["param_groups"], strict=True):
            for key, value in here.items():
                fine = isinstance(group[key], float) and isfinite(group[key]) if key == "lr" else group[key] == value
                if not fine:
                    raise ValueError(f"{key!r} of a group is {group[key]!r}")
            names = {frozenset(saved["state"][i]) for i in here["params"] if i in saved["state"]}
            fit = (
                value.shape in (torch.Size(), parameters[i].shape)
                for i in here["params"]
                for value in saved["state"].get(i, {}).values()
            )
            if len(names) > 1 or not all(fit):
                raise ValueError("the state of a parameter is not of its shape, or incomplete")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"a group lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the checkpoint's optimizer state is damaged ({what}); resume from another.") from error


def _first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values where two settings first differ; the values are equal if they do not."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *then]):
            if then.get(name) != now.get(name):
                return _first_difference(f"{key}.{name}", then.get(name), now.get(name))
    return key, then, now
