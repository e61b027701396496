"""Initial weights of a run: of a checkpoint, or of a run."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import function_settings
from lightning_sv.own_code import modules_named
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, LoadedCheckpoint, read_model
from lightning_sv.runs.difference import check_same
from lightning_sv.runs.directory import LAST
from lightning_sv.runs.sharded_checkpoint import is_sharded
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig


class Start(NamedTuple):
    """Weights that a run starts from.

    Attributes:
        weights: name in the backbone -> weight
        text: sentence for the terminal
        origin: for `summary.json`, with the origin of its own run
    """

    weights: dict[str, Tensor]
    text: str
    origin: dict[str, Any]


def read_start(init_from: str, module: PretrainConfig, data: DataConfig) -> Start:
    """Read the weights of `init_from`, with which this model must compute the same function.

    They are of a checkpoint, or of a run directory's last one. Optimizer, schedule, decay, name,
    initialization and text may differ; the tokenizer may not.

    Raises:
        ConfigError: no such checkpoint, a damaged one, or a different model or tokenizer; the
            message names the first key that differs, and both values
    """
    _check_not_of_transformers(init_from)
    is_run = Path(init_from).is_dir() and not is_sharded(init_from)
    path = str(Path(init_from) / LAST) if is_run else init_from
    try:
        model = read_model(path, allow=modules_named(module.label))
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}") from error
    _check_same_function(path, model, module, data)
    origin = _origin(path, model)
    which = f"{path}, {origin['label']} after step {origin['step']:,}"
    text = f"starts from the weights of {which}; optimizer, schedule and data begin anew"
    return Start(model.weights, text, origin)


def _check_not_of_transformers(init_from: str) -> None:
    if (Path(init_from) / "config.json").is_file():
        found = f"{init_from}, a folder of transformers"
        hint = "Use apply_strategy for its model (docs/own-model.md)."
        raise ConfigError(f"model.init_from is {found}; expected a checkpoint or a run. {hint}")


def _check_same_function(
    path: str, model: LoadedCheckpoint, module: PretrainConfig, data: DataConfig
) -> None:
    """Check that the checkpoint's model and that of this run compute the same."""
    tokenizer = model.checkpoint[CHECKPOINT_KEY].get("tokenizer_sha256")
    theirs = function_settings(model.config, model.strategy, model.options, tokenizer)
    ours = function_settings(
        module.backbone, module.strategy, module.scale_options, data.manifest.tokenizer_sha256
    )
    hint = "Start from weights of the same model and tokenizer."
    check_same("model.init_from: model", theirs, ours, path, hint)


def _origin(path: str, model: LoadedCheckpoint) -> dict[str, Any]:
    """Return where the weights come from, for the summary of the run."""
    made = model.checkpoint[CHECKPOINT_KEY]
    try:
        step = int(model.checkpoint["global_step"])
        tokens_per_step = int(made["data"]["global_batch"]) * int(made["data"]["seq_len"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"model.init_from: {path} does not record its step and batch ({error!r})."
        ) from error
    return {
        "checkpoint": path,
        "label": f"{model.strategy}{model.options.label()}",
        "commit": made.get("commit"),
        "step": step,
        "tokens": step * tokens_per_step,
        "corpus_hash": made.get("corpus_hash"),
        "origin": made.get("origin"),
    }
