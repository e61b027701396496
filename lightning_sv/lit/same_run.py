"""Check that all ranks of a run have the same settings, data and software."""

from typing import Any

import lightning as L
import torch
from torch import distributed

from lightning_sv.callbacks.run_state import settings_of
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import recorded_settings
from lightning_sv.runs.difference import first_difference
from lightning_sv.runs.provenance import commit
from lightning_sv.settings.data import DataConfig


def check_same_on_all_ranks(here: dict[str, Any]) -> None:
    """Check that all ranks have the same values, before the first of them steps: a collective.

    DDP averages gradients only, so copies of the model with different settings would drift apart
    unnoticed.

    Args:
        here: name -> plain value of this rank, which may be nested dictionaries

    Raises:
        ConfigError: on every rank, with the first name that differs, and the values of rank 0 and
            of the other rank
    """
    if not distributed.is_initialized():
        return
    ranks: list[dict[str, Any]] = [here] * distributed.get_world_size()
    distributed.all_gather_object(ranks, here)
    for rank, other in enumerate(ranks):
        _check_same(ranks[0], other, rank)


def _check_same(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name in first | other:
        key, expected, value = first_difference(name, first.get(name), other.get(name))
        if value != expected:
            hint = "Start all ranks with the same settings, corpus, checkpoint and software."
            found = f"{key} is {value} on rank {rank}"
            raise ConfigError(f"{found}; expected {expected}, as on rank 0. {hint}")


def run_values(trainer: L.Trainer, data: DataConfig, seed: int) -> dict[str, Any]:
    """Return what determines a run in any Trainer, as plain values; `seed` is that of the order."""
    module = trainer.lightning_module
    settings = settings_of(module)
    recorded = None if settings is None else recorded_settings(settings, None)
    return {
        type(module).__name__: recorded,
        "Trainer": {
            "max_steps": trainer.max_steps,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
        },
        "TokenDataModule": {
            "seq_len": data.seq_len,
            "micro_batch": data.micro_batch,
            "val_sequences": data.val_sequences,
            "seed": seed,
        },
        "the hash of the corpus": data.manifest.corpus_hash,
        "the hash of the tokenizer": data.manifest.tokenizer_sha256,
        "the commit of lightning_sv": commit(),
        "the version of torch": torch.__version__,
        "the version of lightning": L.__version__,
    }
