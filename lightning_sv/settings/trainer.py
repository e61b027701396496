"""Keys of `lightning.Trainer`: types, our defaults, and rejected values."""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

from lightning_sv.errors import ConfigError, expect

log = logging.getLogger(__name__)


#: type of a value that is read but not used to build an object. With `Any`, jsonargparse imports
#: and instantiates whatever class the value names.
Plain = None | bool | int | float | dict | str


#: our defaults that differ from Lightning's
TRAINER_DEFAULTS: dict[str, Any] = {
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


@dataclass(frozen=True)
class Argument:
    """Treatment of an argument of Lightning's Trainer by the command line.

    Attributes:
        note: what the argument does in a run; for a refused one, what to use instead
        accepted: the only accepted values, which change nothing; empty if Lightning follows every
            value
    """

    note: str
    accepted: tuple[Any, ...] = ()

    @property
    def is_followed(self) -> bool:
        """Whether a run follows other values than the accepted ones."""
        return not self.accepted

    @property
    def help(self) -> str:
        """Help of the key, in place of Lightning's, which describes a Trainer of your own."""
        return self.note if self.is_followed else f"Only the default. {self.note}"


_OTHER_TRAINER = "Use a Trainer of your own."
# With a minimum Lightning leaves out the validation of the last step inside its first epoch.
_OWN_CONDITION = "Give the callback that ends the run a condition on the step."
#: every argument of Lightning's Trainer; docs/own-trainer.md shows this table
TRAINER_ARGUMENTS = {
    "accelerator": Argument("Kind of device."),
    "strategy": Argument(
        "auto, ddp, or lightning_sv.lit.fsdp.FullyShardedStrategy; others are refused."
    ),
    "devices": Argument("Devices per node."),
    "num_nodes": Argument("Number of nodes."),
    "precision": Argument(
        "bf16-mixed, bf16-true, 32-true or 64-true; those of float16 are refused."
    ),
    "logger": Argument("Loggers in addition to the run's TensorBoard files; false is refused."),
    "callbacks": Argument(
        "Callbacks in addition to the run's own; those that change what is trained are refused."
    ),
    "fast_dev_run": Argument("A few batches, in a temporary directory."),
    "max_epochs": Argument("May end a run before max_steps."),
    "min_epochs": Argument(_OWN_CONDITION, (None,)),
    "max_steps": Argument("Optimizer steps; -1 to follow model.tokens_per_param."),
    "min_steps": Argument(_OWN_CONDITION, (None,)),
    "max_time": Argument("Ends a run after a step, with a checkpoint."),
    "limit_train_batches": Argument("Batches per epoch and device, a multiple of those of a step."),
    "limit_val_batches": Argument("Set data.val_sequences instead.", (1.0, None)),
    "limit_test_batches": Argument("No command tests; use validate.", (1.0, None)),
    "limit_predict_batches": Argument("No command predicts; use generate.", (1.0, None)),
    "overfit_batches": Argument(
        "Prepare a corpus of the text to repeat, and set trainer.max_steps.", (0.0, 0)
    ),
    "val_check_interval": Argument("Set data.validations instead.", (1.0, None)),
    "check_val_every_n_epoch": Argument("Set data.validations instead.", (None,)),
    "num_sanity_val_steps": Argument(
        "Batches of a validation before the first step; 0 by default."
    ),
    "log_every_n_steps": Argument("Set scalars.every_n_steps instead.", (None, 50)),
    "enable_checkpointing": Argument(
        "A run writes checkpoints, each checkpoint.every_n_steps.", (None, True)
    ),
    "enable_progress_bar": Argument("Use --quiet.", (None, True)),
    "enable_model_summary": Argument("Lightning's table of modules; false by default."),
    "accumulate_grad_batches": Argument(
        "Set data.global_batch and data.micro_batch instead.", (1, None)
    ),
    "gradient_clip_val": Argument("Largest global norm of the gradient; null for no clipping."),
    "gradient_clip_algorithm": Argument(
        "As in the paper, trainer.gradient_clip_val limits the global norm.", (None, "norm")
    ),
    "deterministic": Argument("Deterministic operations of torch."),
    "benchmark": Argument("cuDNN's search for fast convolutions."),
    "inference_mode": Argument(
        "torch.inference_mode in validation; FullyShardedStrategy uses torch.no_grad."
    ),
    "use_distributed_sampler": Argument(
        "Every device reads its part of the global batch without it.", (False,)
    ),
    "profiler": Argument("A profiler of Lightning."),
    "detect_anomaly": Argument("torch's search for the operation of a gradient of NaN."),
    "barebones": Argument(_OTHER_TRAINER, (False,)),
    "plugins": Argument("Cluster environments, such as SLURMEnvironment; others are refused."),
    "sync_batchnorm": Argument("The models have no batch norm.", (False,)),
    "reload_dataloaders_every_n_epochs": Argument(
        "Opens the corpus again; does not change the order."
    ),
    "default_root_dir": Argument("Set run_dir.", (None,)),
    "enable_autolog_hparams": Argument(
        "A run records its settings for the table of runs.", (True,)
    ),
    "model_registry": Argument(_OTHER_TRAINER, (None,)),
}
_BUDGET = "may end the run before its budget, with a high learning rate and without a summary"
_ROLES = "changes which parameters are trained; set requires_grad in configure_model of a subclass"
_AVERAGES = "validates and saves averaged weights, which no file of the run records"
_BAR = "is a second progress bar; set progress.lines, or use --quiet"
#: callback of Lightning that a `PretrainModule` refuses in any Trainer -> reason and hint, as
#: docs/own-trainer.md
REFUSED_EVERYWHERE = {
    "LearningRateFinder": "changes the recorded rate; compare rates with `lightning-sv sweep --lr`",
    "BatchSizeFinder": "changes the recorded batch; use the size that `lightning-sv plan` prints",
    "GradientAccumulationScheduler": (
        "changes the batch of a step; set accumulate_grad_batches or data.global_batch"
    ),
    "StochasticWeightAveraging": (
        "replaces the schedule; set model.schedule, or use WeightAveraging"
    ),
    "ModelPruning": _ROLES,
    "BackboneFinetuning": _ROLES,
}
#: callback of Lightning that the command line refuses too -> reason and hint
REFUSED_IN_RUNS = {
    "WeightAveraging": _AVERAGES,
    "EMAWeightAveraging": _AVERAGES,
    "RichProgressBar": _BAR,
    "TQDMProgressBar": _BAR,
}
REFUSED_CALLBACKS = REFUSED_EVERYWHERE | REFUSED_IN_RUNS
#: precision -> what is wrong with it
REFUSED_PRECISIONS = {
    "16": "Lightning reads it as 16-mixed, which on a CPU is bf16-mixed",
    "16-true": "AdamW divides by 0 in float16",
    "16-mixed": "its scaled gradients hide values that are not finite",
    "transformer-engine-float16": "AdamW divides by 0 in float16",
}
_ENDING = ("EarlyStopping", "Timer")


def check_trainer_keys(given: Any, *, complete: bool = False) -> None:
    """Reject values and callbacks that a run overwrites or does not support.

    If `complete`, also reject what may end a run early, because a run that is compared must use its
    budget.

    Raises:
        ConfigError: names the key or callback, the reason and a hint
    """
    _check_refused_arguments(given)
    for name in _callback_names(given):
        if name in REFUSED_CALLBACKS:
            raise ConfigError(f"trainer.callbacks: {name} {REFUSED_CALLBACKS[name]}.")
    if complete:
        for end in early_ends(given):
            raise ConfigError(f"{end}; expected runs that can be compared. Remove it.")
    _check_followed_arguments(given)


def early_ends(given: Any) -> list[str]:
    """Return a sentence for each callback or time that may end a run early."""
    ends = [f"trainer.callbacks: {name}" for name in _callback_names(given) if name in _ENDING]
    if given["max_time"] is not None:
        ends.append(f"trainer.max_time {given['max_time']}")
    return [f"{end} {_BUDGET}" for end in ends]


def _callback_names(given: Any) -> list[str]:
    return [class_path(entry).rpartition(".")[2] for entry in entries_of(given["callbacks"])]


def _check_refused_arguments(given: Any) -> None:
    for key, argument in TRAINER_ARGUMENTS.items():
        if argument.is_followed:
            continue
        accepted = map(repr, argument.accepted)  # 1 is one batch for Lightning, 1.0 all of them
        if repr(given[key]) not in accepted:
            raise ConfigError(
                f"trainer.{key} is {given[key]}; expected its default. {argument.note}"
            )


def _check_followed_arguments(given: Any) -> None:
    clip = given["gradient_clip_val"]
    clips = clip is None or clip >= 0
    expect(clips, "trainer.gradient_clip_val", clip, "at least 0, or null for no clipping.")
    for key in ("limit_train_batches", "max_epochs"):
        takes_steps = given[key] != 0
        expect(takes_steps, f"trainer.{key}", given[key], "a number above 0, for a run with steps.")
    logs = given["logger"] is not False
    expect(logs, "trainer.logger", False, "a logger, or null. A run writes its losses.")
    steps = given["max_steps"]
    is_length = steps == -1 or steps >= 1
    expect(is_length, "trainer.max_steps", steps, "at least 1, or -1 for model.tokens_per_param.")
    refuse_float16(given["precision"])  # `check_precision` warns once the run starts


def refuse_float16(precision: object) -> None:
    """Refuse the precisions of float16.

    Raises:
        ConfigError: such a precision, with the reason
    """
    reason = REFUSED_PRECISIONS.get(str(precision))
    if reason is not None:
        raise ConfigError(
            f"trainer.precision is {precision}; expected bf16-mixed or 32-true, because {reason}."
        )


def check_precision(precision: object) -> None:
    """Refuse the precisions of float16, and warn about weights in bfloat16.

    Raises:
        ConfigError: a precision of float16
    """
    refuse_float16(precision)
    if str(precision) == "bf16-true":
        log.warning(
            "trainer.precision bf16-true loses small changes of a scale vector near 1; "
            "bf16-mixed keeps them"
        )


def entries_of(value: Any) -> list[Any]:
    """Return the entries of a key that holds one class, a list of classes, or none."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def class_path(entry: Any) -> str:
    """Return the module and name of a class; empty if the entry names no class."""
    if isinstance(entry, Mapping | Namespace):
        entry = entry.get("class_path")
    if isinstance(entry, str):
        return entry
    return ""


def prepare_process() -> None:
    """Silence warnings of libraries that do not apply to runs, and let CUDA's segments grow.

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
        "TensorFloat32 tensor cores .* not enabled.*",  # it would round float32 products
    ):
        warnings.filterwarnings("ignore", message=message)
