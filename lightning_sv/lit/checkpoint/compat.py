"""Settings in a checkpoint: record them, and check that they are those of the run that reads it."""

import os
from contextlib import suppress
from dataclasses import asdict, replace
from math import isclose, isfinite
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from lightning_sv.callbacks.run_state import data_of
from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, matrix_rate
from lightning_sv.optim.muon import CompositeOptimizer
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT
from lightning_sv.runs.provenance import Segments
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig

#: settings that a checkpoint has as plain values -> their class
_CONFIGS: dict[str, Any] = {
    "backbone": BackboneConfig, "scale_options": ScaleOptions, "optim": OptimConfig, "schedule": ScheduleConfig,
}  # fmt: skip

#: optimizers whose states are numbers or have the shape of their parameter
_ONE_SHAPE = (AdamW, SGD, CompositeOptimizer)


def recorded_settings(module: PretrainConfig, data: DataConfig | None) -> dict[str, Any]:
    """Return the settings that weights, optimizer state and the order of the data depend on."""
    return {
        "backbone": asdict(module.backbone),
        "scale": str(module.strategy),
        "scale_options": asdict(module.scale_options),
        "mask_documents": module.mask_documents,
        "residual": module.residual,
        "tokenizer_sha256": None if data is None else data.manifest.tokenizer_sha256,
        "optim": asdict(module.optim) | {"lr": module.plan.lr},
        "schedule": asdict(module.schedule),
        "init_from": None if module.init_from is None else os.path.abspath(module.init_from),  # noqa: PTH100 (with ..)
        "data": None if data is None else {"seq_len": data.seq_len, "global_batch": data.global_batch},
    }


def record_settings(checkpoint: dict[str, Any], module: Any) -> None:
    """Store the settings of a `PretrainModule` in a checkpoint, next to the progress of `ExactResume`."""
    progress = checkpoint.get(CHECKPOINT_KEY, {})
    settings = recorded_settings(module.settings, data_of(module.trainer))
    checkpoint[CHECKPOINT_KEY] = {"format": FORMAT} | settings | {"built_by": module.built_by} | progress


def check_recorded(checkpoint: dict[str, Any], module: Any) -> None:
    """Check that a checkpoint has the settings of a `PretrainModule`, or for load_from_checkpoint its function."""
    if module._trainer is None:  # load_from_checkpoint, whose arguments may replace the checkpoint's settings
        check_function(checkpoint, module.settings)
        return
    check_settings(
        checkpoint,
        module.settings,
        data_of(module.trainer),
        training=module.trainer.state.fn == "fit",
        own_groups=has_own_groups(module),
        built_by=module.built_by,
    )


def has_own_groups(module: Any) -> bool:
    """Return True if the optimizer's groups may differ from those of the settings, for instance by frozen weights."""
    if module.own_optimizer or module.built_by:
        return True
    if module.backbone is None:
        return False
    trained = [parameter.requires_grad for parameter in module.backbone.parameters()]
    return trained != [parameter.requires_grad for parameter in module.settings.plan.meta().parameters()]


def check_settings(
    checkpoint: dict[str, Any],
    module: PretrainConfig,
    data: DataConfig | None,
    *,
    training: bool,
    own_groups: bool = False,
    built_by: str | None = None,
) -> None:
    """Check that a checkpoint has the settings of this run, because its weights and state would replace them.

    `training` also compares optimizer, schedule, batch and initial weights. Custom data (None) is not compared, nor
    the optimizer's state with `own_groups`, which differ from those of the settings. `built_by` is the class that
    builds the model, if it is not `PretrainModule`.

    Raises:
        ConfigError: a key differs, which the message names with both values; or the optimizer state is damaged
    """
    here = recorded_settings(module, data)
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):
        raise ConfigError(f"the checkpoint was not written by lightning_sv: it has no {CHECKPOINT_KEY!r} entry.")
    then = saved.get("built_by", built_by)  # older checkpoints have no such entry
    wanted = f"that of {then or 'PretrainModule'}, as in the checkpoint. Use its script."
    expect(then == built_by, "the model", f"that of {built_by or 'PretrainModule'}", wanted)
    skipped = {"tokenizer_sha256", "data"} if data is None else set()
    skipped |= set() if training else {"optim", "schedule", "data", "init_from"}
    for key in (key for key in here if key not in skipped):
        then = saved.get(key)
        if key in _CONFIGS and isinstance(then, dict):
            with suppress(TypeError, ValueError, AttributeError):  # a damaged checkpoint: show the difference
                then = asdict(_CONFIGS[key](**then))  # an older checkpoint lacks new fields: their defaults
        where, then, now = first_difference(key, then, here[key])
        hint = "Resume with the same settings, or start a new run."
        if not training:
            hint = "Read the checkpoint with the config.yaml of its run."
        wanted = f"{then}, as in the checkpoint. {hint}"
        expect(then == now, where, now, wanted)
    if training and not own_groups:
        optimizer = build_optimizer(module.plan.parameter_groups(module.plan.meta()), module.optim, module.plan.lr)
        _check_optimizer_state(checkpoint, optimizer)


def check_function(checkpoint: dict[str, Any], module: PretrainConfig) -> None:
    """Check that a module computes the same function with the weights of a checkpoint.

    Arguments of `load_from_checkpoint` may replace training, decay, name and initialization, but not the function.
    `mask_documents` and `residual` count as training, although losses depend on them.

    Raises:
        ConfigError: a key differs, which the message names with both values
    """
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):  # of a subclass with its own on_save_checkpoint
        return
    config, options = BackboneConfig(**saved["backbone"]), ScaleOptions(**saved["scale_options"])
    theirs = function_settings(config, ScaleStrategy.parse(saved["scale"]), options, None)
    ours = function_settings(module.backbone, module.strategy, module.scale_options, None)
    where, then, now = first_difference("model", theirs, ours)
    wanted = f"{then}, as in the checkpoint. Load its weights into a different model with load_state_dict."
    expect(then == now, where.removeprefix("model."), now, wanted)


def check_learning_rate(checkpoint: dict[str, Any], module: PretrainConfig, max_steps: int) -> None:
    """Check that a different number of steps does not change the learning rate of the next step.

    A different length changes every rate of a cosine; wsd does not change before its decay.

    Raises:
        ConfigError: the rate would change; the message has both rates and lengths
    """
    step, segments = checkpoint["global_step"], Segments()
    segments.restore(checkpoint[CHECKPOINT_KEY].get("legs"))
    then = matrix_rate(checkpoint["optimizer_states"][0]["param_groups"])
    now = module.plan.lr * module.schedule.factor(min(step, max_steps - 1), max_steps)
    if isclose(then, now, rel_tol=1e-6):
        return
    length = f" of {segments.length}" if segments.length else ""
    place = f"step {step}{length} of its {module.schedule.name} schedule"
    jump = f"with learning rate {then:.3g}; trainer.max_steps {max_steps} makes that {now:.3g}"
    ways = "Use the same trainer.max_steps, a new run (a wsd one can be extended until it decays), or --allow_lr_jump."
    raise ConfigError(f"the checkpoint is at {place}, {jump}. {ways}")


def _check_optimizer_state(checkpoint: dict[str, Any], optimizer: Optimizer) -> None:
    """Check that groups, except for the scheduled rate, and the shapes of states are those of `optimizer`.

    Torch would load them, and a fused step would write past the end of a state of a different shape. The states of
    an optimizer of the user may have any shape, so they are not checked.

    Raises:
        ConfigError: a group or state differs
    """
    own = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = "one with optimizer state, which resuming needs."
    expect("optimizer_states" in checkpoint, "the checkpoint", "one with weights only", wanted)
    try:
        (saved,) = checkpoint["optimizer_states"]
        if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in own]:
            raise ConfigError("its parameters are numbered otherwise")
        # loading adds only the entries that an older torch did not have
        optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        for here, group in zip(own, optimizer.state_dict()["param_groups"], strict=True):
            for key, value in here.items():
                fine = isinstance(group[key], float) and isfinite(group[key]) if key == "lr" else group[key] == value
                if not fine:
                    raise ConfigError(f"{key!r} of a group is {group[key]!r}")
            if type(optimizer) not in _ONE_SHAPE:
                continue
            states = {i: saved["state"][i] for i in here["params"] if i in saved["state"]}
            sizes = {i: {value.shape for value in state.values()} for i, state in states.items()}
            complete = len({frozenset(state) for state in states.values()}) <= 1
            if not complete or any(sizes[i] - {torch.Size(), parameters[i].shape} for i in sizes):
                raise ConfigError("the state of a parameter is not of its shape, or incomplete")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"a group lacks {error}" if isinstance(error, KeyError) else str(error)
        hint = "train the same parameters as then, or use a different checkpoint."
        raise ConfigError(f"the checkpoint's optimizer state is damaged or does not fit ({what}); {hint}") from error


def first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values of the first difference of two settings; equal values if there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *then]):
            if then.get(name) != now.get(name):
                return first_difference(f"{key}.{name}", then.get(name), now.get(name))
    return key, then, now


def function_settings(
    config: BackboneConfig, strategy: ScaleStrategy, options: ScaleOptions, tokenizer: str | None
) -> dict[str, Any]:
    """Return the settings that decide the function of given weights, without initialization and training."""
    backbone: dict[str, Any] = asdict(config)
    for key in ("name", "init_std", "init_std_by_role", "init_residual_scaling"):
        del backbone[key]
    for key in ("balance_coef", "bias_rate", "z_coef"):
        del backbone["router"][key]
    if config.router.balance == "none":  # the loss of "loss" does not change the function, biases do
        backbone["router"]["balance"] = "loss"
    widths = {"d_head": config.head_width, "d_ff": config.ffn_width, "d_expert": config.expert_width}
    return {
        "backbone": backbone | widths | {"n_kv_head": config.kv_heads},
        "scale": str(replace(strategy, decay=ScaleStrategy().decay)),
        "scale_options": asdict(replace(options, role_at={}, freeze_input_beta=False, initial_gamma_out=1.0)),
        "tokenizer_sha256": tokenizer,
    }
