"""The micro-batch of a run that gives none."""

import os
from typing import Any

import torch

from lightning_sv.plan.plan import fitting_micro_batch
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig


def choose_micro_batch(
    run: PretrainConfig, data: DataConfig, trainer: dict[str, Any], device: torch.device, devices: int
) -> str | None:
    """Set data.micro_batch where it is null: on a GPU, or where a device's share is long, to the largest that fits.

    On a CPU a short share is one micro-batch. Nothing but the order of sums depends on it, so a run may be resumed
    on a device that takes another.

    Args:
        run: what is trained
        data: what it reads
        trainer: the trainer's keys
        device: of this process
        devices: their number; all alike

    Returns:
        What was chosen, in words; None where nothing was.

    Raises:
        ConfigError: not one sequence fits
    """
    share = data.share(devices).micro_batch
    memory = _memory(device)
    logits = 4 * share * data.seq_len * run.config.vocab_size
    if data.micro_batch is not None or memory is None or (device.type == "cpu" and 4 * logits <= memory):
        return None
    data.micro_batch = fitting_micro_batch(run, data, trainer, memory, devices)
    return (
        f"micro-batches of {data.micro_batch} x {data.seq_len:,} tokens, the largest that divides a device's {share} "
        f"sequences and fits its {memory / 2**30:.0f} GiB (data.micro_batch is null)"
    )


def _memory(device: torch.device) -> int | None:
    """Bytes of a device, not of what is free of them: the choice is the same on all that are alike."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type == "cpu" else None
