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

import torch
from torch.torch_version import TorchVersion

from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: as in pyproject.toml
OLDEST_TORCH = "2.11"


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
    "gradient_clip_algorithm": ((None, "norm"), "As in the paper, trainer.gradient_clip_val limits the global norm."),
    "use_distributed_sampler": ((False,), "Every device reads its part of the global batch without it."),
    "overfit_batches": ((0.0,), "Prepare a corpus of the text to repeat, and set trainer.max_steps."),
}
#: Maximum number of steps of a run; more are a typing error.
_MOST_STEPS = 10**12
#: Maximum number of processes on one CPU; more are a typing error.
_MOST_PROCESSES = 1024
_BUDGET = "may end the run before its budget, with a high learning rate and without a summary"
_ROLES = "changes trained parameters outside the groups of their roles, which is not supported"
#: unsupported callback of Lightning -> reason and hint
REFUSED_CALLBACKS = {
    "LearningRateFinder": "sets a rate that the schedule ignores; compare rates with `lightning-sv sweep --lr`",
    "BatchSizeFinder": "has no batch to set; set data.micro_batch, `lightning-sv plan` prints the largest that fits",
    "GradientAccumulationScheduler": "changes the global batch; set data.global_batch instead",
    "StochasticWeightAveraging": "replaces the schedule; set model.schedule instead",
    "ModelPruning": _ROLES,
    "BackboneFinetuning": _ROLES,
}
#: callback or trainer key that may end a run early -> warning
WARNED_CALLBACKS = {"EarlyStopping": _BUDGET, "Timer": _BUDGET}
WARNED = {"max_epochs": ((None, -1), _BUDGET), "max_time": ((None,), _BUDGET)}
#: precisions with weights in half precision
_HALF_WEIGHTS = ("bf16-true", "16-true")


def check_trainer_keys(given: Any) -> None:
    """Reject values that would be overwritten, or that would end a run without its last validation."""
    for key, (accepted, hint) in DERIVED.items():
        if given[key] not in accepted:
            raise ConfigError(f"trainer.{key} is {given[key]}; expected no value, because it is derived. {hint}")
    for key, (accepted, effect) in WARNED.items():
        if given[key] not in accepted:
            log.warning("trainer.%s %s %s", key, given[key], effect)
    check_callbacks(given["callbacks"])
    check_devices(given["accelerator"], given["devices"])
    if (given["gradient_clip_val"] or 0) < 0:
        raise ConfigError(
            f"trainer.gradient_clip_val is {given['gradient_clip_val']}; expected at least 0, or null for no clipping."
        )
    if given["max_steps"] != -1 and not 1 <= given["max_steps"] <= _MOST_STEPS:
        raise ConfigError(f"trainer.max_steps is {given['max_steps']}; expected at least 1, or -1 for the budget.")
    for key in ("min_steps", "log_every_n_steps"):
        if given[key] is not None and not 0 <= given[key] <= _MOST_STEPS:
            raise ConfigError(f"trainer.{key} is {given[key]}; expected a whole number of at least 0.")
    if str(given["precision"]) in _HALF_WEIGHTS:
        log.warning(
            "trainer.precision %s loses small changes of a scale vector near 1; bf16-mixed keeps them",
            given["precision"],
        )


def check_callbacks(given: Any, *, warn: bool = True) -> None:
    """Reject unsupported callbacks of Lightning.

    Args:
        given: trainer.callbacks: None, one or a list, each an object or its class_path
        warn: if True, log a warning for callbacks that may end a run early

    Raises:
        ConfigError: names the callback, the reason and a hint
    """
    for callback in given if isinstance(given, list | tuple) else [given]:
        path = callback.get("class_path") if hasattr(callback, "get") else callback
        names = [str(path).rpartition(".")[2], *(cls.__name__ for cls in type(callback).__mro__)]
        if name := next((name for name in names if name in REFUSED_CALLBACKS), None):
            raise ConfigError(f"trainer.callbacks: {name} {REFUSED_CALLBACKS[name]}.")
        if warn and (name := next((name for name in names if name in WARNED_CALLBACKS), None)):
            log.warning("trainer.callbacks: %s %s", name, WARNED_CALLBACKS[name])


def check_devices(accelerator: Any, devices: Any) -> None:
    """Reject impossible devices, for which Lightning's errors are unclear."""
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not _has_gpu())
    if on_cpu:
        usable = str(devices).isdecimal() and 1 <= int(devices) <= _MOST_PROCESSES
        expected = f"auto, or a number of processes from 1 to {_MOST_PROCESSES}"
    else:
        usable = isinstance(devices, list) or re.fullmatch(r"-1|\d+(,\d+)*,?", str(devices)) is not None
        expected = "auto, -1 for all, a number of GPUs, or their indices"
    if devices != "auto" and not usable:
        raise ConfigError(f"trainer.devices is {devices!r}; expected {expected}.")


def _has_gpu() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()


def check_gpu(accelerator: Any) -> None:
    """Reject a GPU accelerator if torch finds no GPU, with torch's reason."""
    if accelerator not in ("gpu", "cuda") or _has_gpu():
        return
    why = "there is none, or CUDA_VISIBLE_DEVICES hides it"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # a CPU build, or a missing or old driver
        why = str(error).strip().splitlines()[0].rstrip(".")
    raise ConfigError(
        f"trainer.accelerator is {accelerator!r}, and torch {torch.__version__} finds no GPU: {why}. Use "
        "trainer/cpu.yaml (make train TRAINER=cpu), or check the output of `make doctor` and nvidia-smi."
    )


def prepare_torch() -> None:
    """Check the version of torch, and let CUDA's memory segments grow; call it before CUDA starts."""
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        raise ConfigError(f"torch {torch.__version__} is too old, {OLDEST_TORCH} is needed; run 'make install'.")
    # This avoids fragmentation if sizes change, as between training and validation.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def quiet_warnings() -> None:
    """Silence warnings of libraries that do not apply to our runs."""
    for message in (
        ".*__len__` could be inaccurate.*",
        ".*does not have many workers.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*log_every_n_steps.*",
        ".*Checkpoint directory .* exists and is not empty.*",
    ):
        warnings.filterwarnings("ignore", message=message)
