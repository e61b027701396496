"""Initial weights of a run: of a checkpoint, of a run, or of a transformers model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import first_difference, function_settings
from lightning_sv.nn import Backbone
from lightning_sv.own_code import modules_named
from lightning_sv.roles.fake import check_folder
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, LoadedCheckpoint, read_model
from lightning_sv.runs.directory import LAST
from lightning_sv.runs.sharded_checkpoint import is_sharded
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig, is_of_transformers
from lightning_sv.settings.paths import expand_path
from lightning_sv.settings.words import options_of

#: fields of a backbone that a folder of transformers does not decide
_NOT_SIZES = ("name", "router", "init_std", "init_std_by_role", "init_residual_scaling")


class Start(NamedTuple):
    """Weights that a run starts from.

    Attributes:
        load: fills a backbone with them
        text: sentence for the terminal
        origin: for `summary.json`, with the origin of its own run; None for transformers
    """

    load: Callable[[Backbone], object]
    text: str
    origin: dict[str, Any] | None = None


def read_start(init_from: str, module: PretrainConfig, data: DataConfig) -> Start:
    """Read the weights of `init_from`, with which this model must compute the same function.

    They are of a checkpoint, of a run directory's last one, or of a folder of transformers.
    Optimizer, schedule, decay, name, initialization and text may differ; the tokenizer may not.

    Raises:
        ConfigError: no such checkpoint, a damaged one, or a different model or tokenizer; the
            message names the first key that differs, and both values
    """
    if is_of_transformers(init_from):
        return _start_of_transformers(init_from, module, data)
    check_folder(Path(init_from))
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
    return Start(partial(Backbone.load_state_dict, state_dict=model.weights), text, origin)


def _start_of_transformers(init_from: str, module: PretrainConfig, data: DataConfig) -> Start:
    # 0.2 seconds of imports
    from lightning_sv.interop.hf.load import check_same_tokenizer, check_start, load_hugging_face

    check_start(module.plan.meta(), init_from)
    check_same_tokenizer(Tokenizer.load(data.folder), Path(init_from))
    text = f"starts from the weights of {init_from}, a model of transformers"
    return Start(partial(load_hugging_face, folder=init_from), text)


def _check_same_function(
    path: str, model: LoadedCheckpoint, module: PretrainConfig, data: DataConfig
) -> None:
    """Check that the checkpoint's model and that of this run compute the same."""
    tokenizer = model.checkpoint[CHECKPOINT_KEY].get("tokenizer_sha256")
    theirs = function_settings(model.config, model.strategy, model.options, tokenizer)
    ours = function_settings(
        module.backbone, module.strategy, module.scale_options, data.manifest.tokenizer_sha256
    )
    key, then, now = first_difference("model", theirs, ours)
    if then != now:
        hint = "Start from weights of the same model and tokenizer."
        raise ConfigError(f"model.init_from: {key} is {now}; expected {then}, as in {path}. {hint}")


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


def with_sizes(words: Sequence[str]) -> list[str]:
    """Return the words of `fit` with the sizes of `--model.init_from`, a transformers folder."""
    result: list[str] = []
    for option in options_of(words):
        result += option.words
        if option.name == "model.init_from" and option.value not in (None, "null"):
            result += _size_words(expand_path(str(option.value), "--model.init_from"))
    return result


def _size_words(init_from: str) -> list[str]:
    """Return the words that set the sizes of a folder of transformers; none for other paths."""
    if not is_of_transformers(init_from):
        return []
    from lightning_sv.interop.hf.read_config import backbone_config

    words: list[str] = []
    for name, value in asdict(backbone_config(init_from)).items():
        if name not in _NOT_SIZES and value is not None:
            words.append(f"--model.backbone.{name}={json.dumps(value)}")
    return words
