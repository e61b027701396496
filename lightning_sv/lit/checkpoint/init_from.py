"""Weights that a run starts from: whether those of another run fit this one, and where they are from."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import first_difference
from lightning_sv.nn import BackboneConfig
from lightning_sv.nn.config import RouterConfig
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
    """Weights to start from.

    Attributes:
        weights: by their names in the backbone
        origin: what `summary.json` says of them: checkpoint, label, commit, step, tokens, corpus_hash, and the origin
            of the run that they are of; None where a checkpoint of an earlier version does not say
    """

    weights: dict[str, Tensor]
    origin: dict[str, Any]

    def __str__(self) -> str:
        made = self.origin
        return (
            f"starts from the weights of {made['checkpoint']}, {made['label']} after step {made['step']:,}; "
            "the optimizer, the schedule and the order of the data begin anew"
        )


def read_start(init_from: str, module: PretrainConfig, data: DataConfig) -> Start:
    """Read the weights of `init_from`, if they make this model the function that they made of theirs.

    Args:
        init_from: a checkpoint, or a run directory for its last
        module: what is trained; how it is trained may differ: optimizer, schedule, decay, name, initialization
        data: what it reads; the text may differ, its tokenizer may not

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or its model or tokenizer is another: names the first
            key that differs, and both values
    """
    path = str(Path(init_from) / LAST) if Path(init_from).is_dir() and not is_sharded(init_from) else init_from
    try:
        model = read_model(path, allow=modules_named(str(module.strategy)))
    except ConfigError as error:
        raise ConfigError(f"model.init_from: {error}") from error
    made = model.checkpoint[CHECKPOINT_KEY]
    theirs = _function(model.config, model.strategy, model.options)
    ours = _function(module.backbone, module.strategy, module.scale_options)
    where, then, now = first_difference("model", theirs, ours)
    if then == now:
        where, then, now = "tokenizer_sha256", made.get("tokenizer_sha256"), data.manifest.tokenizer_sha256
    if then != now:
        raise ConfigError(
            f"model.init_from: {path} has {where} = {then}, this run has {now}; start from weights of the same model "
            "and tokenizer."
        )
    try:
        step, batch = int(model.checkpoint["global_step"]), made["data"]
        origin = {
            "checkpoint": path,
            "label": f"{model.strategy}{model.options.label()}",
            "commit": made.get("commit"),
            "step": step,
            "tokens": step * int(batch["global_batch"]) * int(batch["seq_len"]),
            "corpus_hash": made.get("corpus_hash"),
            "origin": check_origin(made.get("origin")),
        }
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"model.init_from: {path} does not say its step and batch ({error!r}).") from error
    return Start(model.weights, origin)


def check_origin(saved: Any) -> dict[str, Any] | None:
    """Return what a checkpoint says of the weights that its run started from; None for a run of its own.

    Raises:
        ConfigError: it is nothing that `summary.json` can hold
    """
    if saved is not None and not isinstance(saved, dict):
        raise ConfigError(f"the checkpoint's origin is damaged (a {type(saved).__name__}); use another.")
    try:
        json.dumps(saved)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the checkpoint's origin is damaged ({error}); use another.") from error
    return saved


def _function(config: BackboneConfig, strategy: ScaleStrategy, options: ScaleOptions) -> dict[str, Any]:
    """Return what decides the model's function of its weights, without how they are drawn and trained."""
    drawn = BackboneConfig(d_model=2, n_layer=1, n_head=1)
    router = RouterConfig()
    backbone = replace(
        config,
        **{key: getattr(drawn, key) for key in ("name", "init_std", "init_residual_scaling")},
        router=replace(config.router, **{key: getattr(router, key) for key in ("balance_coef", "bias_rate", "z_coef")}),
        d_head=config.head_width,
        n_kv_head=config.kv_heads,
        d_ff=config.ffn_width,
        d_expert=config.expert_width,
    )
    return {
        "backbone": asdict(backbone),
        "scale": str(replace(strategy, decay=ScaleStrategy().decay)),
        "scale_options": asdict(replace(options, role_at={}, freeze_input_beta=False)),
    }


def with_sizes(words: Sequence[str]) -> list[str]:
    """Add after --model.init_from DIR, of transformers, the sizes of its model; a run's own config holds them already.

    Args:
        words: command line of `fit`

    Raises:
        ConfigError: the folder holds no model that can be read
    """
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
