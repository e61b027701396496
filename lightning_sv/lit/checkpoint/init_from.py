"""Initial weights from a different run or from transformers."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import first_difference
from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, read_model
from lightning_sv.runs.directory import LAST
from lightning_sv.runs.sharded_checkpoint import is_sharded
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.scale.strategy import modules_named
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig, is_of_transformers
from lightning_sv.settings.paths import expand_path

#: key of the weights to start from
_KEY = "--model.init_from"


class Start(NamedTuple):
    """Weights that a run starts from.

    Attributes:
        load: fill a backbone with them
        text: sentence about them for the terminal
        origin: for `summary.json`: checkpoint, label, commit, step, tokens, corpus_hash, and the origin of its run;
            None for a model of transformers
    """

    load: Callable[[Backbone], object]
    text: str
    origin: dict[str, Any] | None = None


def read_start(init_from: str, module: PretrainConfig, data: DataConfig) -> Start:
    """Read the weights of `init_from`, after checking that this model computes the same function with them.

    They are of a checkpoint, of a run directory's last one, or of a folder of transformers. Optimizer, schedule, decay,
    name, initialization and text may differ; the tokenizer may not.

    Raises:
        ConfigError: no such checkpoint, a damaged one, or a different model or tokenizer; the message names the first
            key that differs, and both values
    """
    if is_of_transformers(init_from):
        # 0.2 seconds of imports
        from lightning_sv.interop.hf.load import check_start, load_hugging_face
        from lightning_sv.interop.hf.tokenizer import check_same_tokenizer

        check_start(module.meta(), init_from)
        check_same_tokenizer(Tokenizer.load(data.folder), Path(init_from))
        text = f"starts from the weights of {init_from}, a model of transformers"
        return Start(partial(load_hugging_face, folder=init_from), text)
    path = str(Path(init_from) / LAST) if Path(init_from).is_dir() and not is_sharded(init_from) else init_from
    try:
        model = read_model(path, allow=modules_named(str(module.strategy)))
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}") from error
    made = model.checkpoint[CHECKPOINT_KEY]
    theirs = _function(model.config, model.strategy, model.options, made.get("tokenizer_sha256"))
    ours = _function(module.backbone, module.strategy, module.scale_options, data.manifest.tokenizer_sha256)
    where, then, now = first_difference("model", theirs, ours)
    if then != now:
        raise ConfigError(
            f"model.init_from: {where} is {now}; expected {then}, as in {path}. Start from weights of the same "
            "model and tokenizer."
        )
    label = f"{model.strategy}{model.options.label()}"
    try:
        step, batch = int(model.checkpoint["global_step"]), made["data"]
        origin = {
            "checkpoint": path,
            "label": label,
            "commit": made.get("commit"),
            "step": step,
            "tokens": step * int(batch["global_batch"]) * int(batch["seq_len"]),
            "corpus_hash": made.get("corpus_hash"),
            "origin": made.get("origin"),
        }
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"model.init_from: {path} does not record its step and batch ({error!r}).") from error
    text = (
        f"starts from the weights of {path}, {label} after step {step:,}; the optimizer, the schedule and the order of "
        "the data begin anew"
    )
    return Start(partial(Backbone.load_state_dict, state_dict=model.weights), text, origin)


def _function(
    config: BackboneConfig, strategy: ScaleStrategy, options: ScaleOptions, tokenizer: str | None
) -> dict[str, Any]:
    """Return the settings that decide the function of given weights, without initialization and training."""
    backbone: dict[str, Any] = asdict(config)
    for key in ("name", "init_std", "init_residual_scaling"):
        del backbone[key]
    for key in ("balance_coef", "bias_rate", "z_coef"):
        del backbone["router"][key]
    widths = {"d_head": config.head_width, "d_ff": config.ffn_width, "d_expert": config.expert_width}
    return {
        "backbone": backbone | widths | {"n_kv_head": config.kv_heads},
        "scale": str(replace(strategy, decay=ScaleStrategy().decay)),
        "scale_options": asdict(replace(options, role_at={}, freeze_input_beta=False)),
        "tokenizer_sha256": tokenizer,
    }


def with_sizes(words: Sequence[str]) -> list[str]:
    """Return the words of `fit` with the sizes of the model after `--model.init_from DIR`, a folder of transformers."""
    more: list[str] = []
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith(_KEY) else [word])]
    for flag, word in itertools.pairwise(["", *parts]):
        more.append(word)
        if flag != _KEY or word == "null":
            continue
        word = expand_path(word, flag)
        if is_of_transformers(word):
            from lightning_sv.interop.hf import backbone_config

            sizes = asdict(backbone_config(word))
            own = ("name", "router", "init_std", "init_residual_scaling")
            given = {key: value for key, value in sizes.items() if key not in own and value is not None}
            more += [f"--model.backbone.{key}={json.dumps(value)}" for key, value in given.items()]
    return more
