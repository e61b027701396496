"""How a run's Trainer distributes a step over GPUs, read from its settings."""

from typing import Any, NamedTuple

from lightning_sv.errors import ConfigError, expect


class Parallel(NamedTuple):
    """Distribution of a step over GPUs.

    Args:
        kind: single, ddp or fsdp
        bucket_view: under ddp, gradients are views of the buckets (gradient_as_bucket_view)
    """

    kind: str
    bucket_view: bool = False


def check_compiled(compile: str, *, is_sharded: bool) -> None:
    """Check model.compile: a sharded model is compiled block by block, as it is sharded.

    Raises:
        ConfigError: the complete model is compiled
    """
    fits = compile != "model" or not is_sharded
    expect(fits, "model.compile", compile, "block or none if the model is sharded.")


def find_strategy(trainer: dict[str, Any], gpus: int) -> Parallel:
    """Parse trainer.strategy, a name or a class with its arguments."""
    strategy = trainer.get("strategy") or "auto"
    if isinstance(strategy, str):
        strategy = {"class_path": strategy}
    spec = strategy["class_path"]
    options = strategy.get("init_args") or {}
    name = spec.rpartition(".")[2].lower()
    if "sharded" in name:  # FullyShardedStrategy; Lightning's own "fsdp" is not supported
        return Parallel("fsdp")
    if "ddp" in name:  # on one GPU, too, it copies gradients into buckets
        return Parallel("ddp", bucket_view=bool(options.get("gradient_as_bucket_view")))
    if name == "auto" or "single" in name:
        return Parallel("single" if gpus == 1 else "ddp")
    classes = "auto, ddp or lightning_sv.lit.fsdp.FullyShardedStrategy"
    raise ConfigError(f"trainer.strategy is {spec!r}; expected {classes}.")
