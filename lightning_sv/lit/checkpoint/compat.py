"""Settings in a checkpoint: record them, and check that they are those of the run that reads it.

==============================  ============================================================
reader of the checkpoint        compared settings
==============================  ============================================================
a fit that resumes it           all (`check_settings`)
a validation                    all but those of the training (`check_settings`)
`load_from_checkpoint`          those of the function (`check_function`)
a fit that starts from weights  those of the function and the tokenizer (`lit.init_from`)
==============================  ============================================================

Settings of the data are compared for a `TokenDataModule` alone.
"""

import os
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lightning_sv.callbacks.run_state import data_of
from lightning_sv.errors import ConfigError
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT
from lightning_sv.runs.difference import check_same
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig

#: settings that a checkpoint has as plain values -> their class
_CONFIGS: dict[str, Any] = {
    "backbone": BackboneConfig,
    "scale_options": ScaleOptions,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
}
#: settings that decide how a model is trained, not what it computes
_TRAINING = {"optim", "schedule", "data", "init_from"}
#: settings of the data module
_DATA = {"tokenizer_sha256", "data"}


def recorded_settings(module: PretrainConfig, data: DataConfig | None) -> dict[str, Any]:
    """Return the settings that weights, optimizer state and the order of the data depend on."""
    tokenizer = None
    batch = None
    init_from = module.init_from
    if init_from is not None:
        init_from = os.path.abspath(init_from)  # noqa: PTH100 (also removes ..)
    if data is not None:
        tokenizer = data.manifest.tokenizer_sha256
        batch = {"seq_len": data.seq_len, "global_batch": data.global_batch}
    return {
        "backbone": asdict(module.backbone),
        "scale": str(module.strategy),
        "scale_options": asdict(module.scale_options),
        "mask_documents": module.mask_documents,
        "residual": module.residual,
        "tokenizer_sha256": tokenizer,
        "optim": asdict(module.optim) | {"lr": module.plan.lr},
        "schedule": asdict(module.schedule),
        "init_from": init_from,
        "data": batch,
    }


def record_settings(checkpoint: dict[str, Any], module: Any) -> None:
    """Store the settings of a `PretrainModule`, next to the progress of `ExactResume`."""
    progress = checkpoint.get(CHECKPOINT_KEY, {})
    settings = recorded_settings(module.settings, data_of(module.trainer))
    own = {"format": FORMAT, **settings, "built_by": module.built_by}
    checkpoint[CHECKPOINT_KEY] = own | progress


def check_recorded(checkpoint: dict[str, Any], module: Any) -> None:
    """Check that a checkpoint has the settings of a `PretrainModule`.

    In load_from_checkpoint, whose arguments may replace settings, check its function alone.
    """
    if module._trainer is None:
        check_function(checkpoint, module.settings)
        return
    check_settings(
        checkpoint,
        module.settings,
        data_of(module.trainer),
        training=module.trainer.state.fn == "fit",
        built_by=module.built_by,
    )


def check_settings(
    checkpoint: dict[str, Any],
    module: PretrainConfig,
    data: DataConfig | None,
    *,
    training: bool,
    built_by: str | None = None,
) -> None:
    """Check that a checkpoint has the settings of this run; its weights and state replace them.

    Args:
        checkpoint: content of the checkpoint
        module: settings of the model
        data: settings of the data; None for custom data, which are not compared
        training: if True, also compare optimizer, schedule, batch and initial weights
        built_by: class that builds the model, if it is not `PretrainModule`

    Raises:
        ConfigError: a key differs, which the message names with both values; or `training`, and
            the checkpoint has weights only
    """
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):
        found = f"it has no {CHECKPOINT_KEY!r} entry"
        raise ConfigError(f"the checkpoint was not written by lightning_sv: {found}.")
    _check_builder(saved.get("built_by", built_by), built_by)  # older checkpoints lack the entry

    hint = "Read the checkpoint with the config.yaml of its run."
    if training:
        hint = "Resume with the same settings, or start a new run."
    for key, value in _compared_settings(module, data, training=training).items():
        check_same(key, _with_defaults(key, saved.get(key)), value, "the checkpoint", hint)

    has_optimizer = "optimizer_states" in checkpoint
    if training and not has_optimizer:
        expected = "also the state of the optimizer"
        hint = "To start from its weights, set model.init_from, or use load_from_checkpoint."
        raise ConfigError(f"the checkpoint has weights only; expected {expected}. {hint}")


def _check_builder(then: str | None, now: str | None) -> None:
    """Check that the class that builds the model is that of the checkpoint."""
    if then != now:
        expected = f"that of {then or 'PretrainModule'}, as in the checkpoint. Use its script."
        raise ConfigError(f"the model is that of {now or 'PretrainModule'}; expected {expected}")


def _compared_settings(
    module: PretrainConfig, data: DataConfig | None, *, training: bool
) -> dict[str, Any]:
    """Return the settings of this run that a checkpoint must have too."""
    settings = recorded_settings(module, data)
    left_out: set[str] = set()
    if data is None:
        left_out |= _DATA
    if not training:
        left_out |= _TRAINING
    return {key: value for key, value in settings.items() if key not in left_out}


def _with_defaults(key: str, saved: Any) -> Any:
    """Return saved settings with the defaults of fields that an older checkpoint lacks."""
    if key in _CONFIGS and isinstance(saved, dict):
        with suppress(TypeError, ValueError, AttributeError):  # damaged: show the difference
            return asdict(_CONFIGS[key](**saved))
    return saved


def check_function(checkpoint: dict[str, Any], module: PretrainConfig) -> None:
    """Check that a module computes the same function with the weights of a checkpoint.

    Arguments of `load_from_checkpoint` may replace training, decay, name and initialization, but
    not the function. `mask_documents` and `residual` count as training, although losses depend on
    them.

    Raises:
        ConfigError: a key differs, which the message names with both values
    """
    saved = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(saved, dict):  # of a subclass with its own on_save_checkpoint
        return
    config = BackboneConfig(**saved["backbone"])
    options = ScaleOptions(**saved["scale_options"])
    theirs = function_settings(config, ScaleStrategy.parse(saved["scale"]), options, None)
    ours = function_settings(module.backbone, module.strategy, module.scale_options, None)
    hint = "Load its weights into a different model with load_state_dict."
    for key, value in ours.items():
        check_same(key, theirs[key], value, "the checkpoint", hint)


def function_settings(
    config: BackboneConfig, strategy: ScaleStrategy, options: ScaleOptions, tokenizer: str | None
) -> dict[str, Any]:
    """Return the settings that decide the function of given weights."""
    backbone: dict[str, Any] = asdict(config)
    for key in ("name", "init_std", "init_std_by_role", "init_residual_scaling"):
        del backbone[key]
    for key in ("balance_coef", "bias_rate", "z_coef"):
        del backbone["router"][key]
    if config.router.balance == "none":  # as for "loss"; only biases change the function
        backbone["router"]["balance"] = "loss"
    backbone["d_head"] = config.head_width
    backbone["d_ff"] = config.ffn_width
    backbone["d_expert"] = config.expert_width
    backbone["n_kv_head"] = config.kv_heads
    trained = replace(options, role_at={}, freeze_input_beta=False, initial_gamma_out=1.0)
    return {
        "backbone": backbone,
        "scale": str(replace(strategy, decay=ScaleStrategy().decay)),
        "scale_options": asdict(trained),
        "tokenizer_sha256": tokenizer,
    }
