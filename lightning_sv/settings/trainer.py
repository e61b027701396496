"""Keys of `lightning.Trainer`: types, our defaults, and rejected values."""

import ast
import builtins
import logging
import os
import re
import typing
import warnings
from collections import defaultdict
from dataclasses import make_dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace

from lightning_sv.errors import ConfigError, expect

log = logging.getLogger(__name__)


@cache
def trainer_keys() -> type:
    """Return a dataclass with the arguments of `lightning.Trainer`: their names, types and defaults.

    They are read from its source, because importing Lightning takes several seconds. Its own classes become `Any`.
    """
    (root,) = map(Path, find_spec("lightning").submodule_search_locations)  # type: ignore[union-attr,arg-type]
    known = {"timedelta": timedelta, "_PATH": str | Path, "_LITERAL_WARN": Literal["warn"], "Strategy": dict[str, Any]}
    names = defaultdict[str, Any](lambda: Any, vars(builtins) | vars(typing) | known)

    def evaluate(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "Trainer", "eval"), {}, names)

    for node in ast.parse((root / "fabric/plugins/precision/precision.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
            names[name.id] = evaluate(node.value)
    text = (root / "pytorch/trainer/trainer.py").read_text(encoding="utf-8")
    (header,) = re.findall(r"def __init__\(.*?\) -> None:", text, re.DOTALL)
    init = ast.parse(f"{header} ...").body[0].args  # type: ignore[attr-defined]
    given: Any = zip(init.kwonlyargs, init.kw_defaults, strict=True)
    return make_dataclass("TrainerKeys", [(arg.arg, evaluate(arg.annotation), evaluate(value)) for arg, value in given])


#: our defaults that differ from Lightning's
TRAINER_DEFAULTS: dict[str, Any] = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
#: trainer key -> (accepted values, hint)
DERIVED = {
    "accumulate_grad_batches": ((1, None), "Set data.global_batch and data.micro_batch instead."),
    "val_check_interval": ((1.0, None), "Set data.validations instead."),
    "limit_val_batches": ((1.0, None), "Set data.val_sequences instead."),
    "check_val_every_n_epoch": ((None,), "Set data.validations instead."),
    "enable_checkpointing": ((None, True), "A run writes checkpoints, each checkpoint.every_n_steps."),
    "enable_progress_bar": ((None, True), "Use --quiet."),
    "barebones": ((False,), "Use a Trainer of your own."),
    "default_root_dir": ((None,), "Set run_dir."),
    "gradient_clip_algorithm": ((None, "norm"), "As in the paper, trainer.gradient_clip_val limits the global norm."),
    "use_distributed_sampler": ((False,), "Every device reads its part of the global batch without it."),
    "overfit_batches": ((0.0, 0), "Prepare a corpus of the text to repeat, and set trainer.max_steps."),
}
_BUDGET = "may end the run before its budget, with a high learning rate and without a summary"
_ROLES = "changes trained parameters outside the groups of their roles, which is not supported"
_AVERAGES = "validates and saves averaged weights, which no file of the run records"
_BAR = "is a second progress bar; set progress.lines, or use --quiet"
#: unsupported callback of Lightning -> reason and hint
REFUSED_CALLBACKS = {
    "LearningRateFinder": "changes the rate in config.yaml; compare rates with `lightning-sv sweep --lr`",
    "BatchSizeFinder": "changes the global batch; set data.micro_batch to the size that `lightning-sv plan` prints",
    "GradientAccumulationScheduler": "changes the global batch; set data.global_batch instead",
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "RichProgressBar": _BAR,
    "TQDMProgressBar": _BAR,
    "StochasticWeightAveraging": "replaces the schedule; set model.schedule instead",
    "ModelPruning": _ROLES,
    "BackboneFinetuning": _ROLES,
}
ENDING_CALLBACKS = ("EarlyStopping", "Timer")


def check_trainer_keys(given: Any, *, complete: bool = False) -> None:
    """Reject values and callbacks that a run overwrites or does not support; warn about those that may end it early.

    If `complete`, reject these too: a run that is compared must use its budget.

    Raises:
        ConfigError: names the key or callback, the reason and a hint
    """
    for key, (accepted, hint) in DERIVED.items():
        same = repr(given[key]) in map(repr, accepted)  # 1 is one batch for Lightning, 1.0 all of them
        expect(same, f"trainer.{key}", given[key], f"its default. {hint}")
    early = [] if given["max_time"] is None else [f"trainer.max_time {given['max_time']}"]
    callbacks = given["callbacks"]
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = callback["class_path"] if isinstance(callback, dict | Namespace) else callback
        name = str(path).rpartition(".")[2]
        if name in REFUSED_CALLBACKS:
            raise ConfigError(f"trainer.callbacks: {name} {REFUSED_CALLBACKS[name]}.")
        if name in ENDING_CALLBACKS:
            early.append(f"trainer.callbacks: {name}")
    for what in early:
        if complete:
            raise ConfigError(f"{what} {_BUDGET}; expected runs that can be compared. Remove it.")
        log.warning("%s %s", what, _BUDGET)
    clip, steps = given["gradient_clip_val"], given["max_steps"]
    expect((clip or 0) >= 0, "trainer.gradient_clip_val", clip, "at least 0, or null for no clipping.")
    for key in ("limit_train_batches", "max_epochs"):
        expect(given[key] != 0, f"trainer.{key}", given[key], "a number above 0, because a run takes steps.")
    expect(given["logger"] is not False, "trainer.logger", False, "a logger, or null. A run writes its losses.")
    expect(steps == -1 or steps >= 1, "trainer.max_steps", steps, "at least 1, or -1 to follow model.tokens_per_param.")
    if str(given["precision"]) == "bf16-true":
        log.warning("trainer.precision bf16-true loses small changes of a scale vector near 1; bf16-mixed keeps them")


def prepare_process() -> None:
    """Silence warnings of libraries that do not apply to our runs, and let CUDA's memory segments grow.

    Growing segments avoid fragmentation if sizes change, as between training and validation.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for message in (
        ".*__len__` could be inaccurate.*",
        ".*does not have many workers.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*log_every_n_steps.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        "TensorFloat32 tensor cores .* not enabled.*",  # it would round the products of float32 runs
    ):
        warnings.filterwarnings("ignore", message=message)
