"""Choose the micro-batch size automatically."""

import os
from typing import Any

import torch

from lightning_sv.plan.plan import fitting_micro_batch
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig


def choose_micro_batch(
    run: PretrainConfig, data: DataConfig, trainer: dict[str, Any], device: torch.device, devices: int
) -> str | None:
    """Set data.micro_batch, if null, to the largest value that fits the device.

    Applies on a GPU, and on a CPU with a large per-device batch; otherwise the batch is one micro-batch. Only the order
    of sums depends on it, so a run may resume on a device with a different one.

    Args:
        run: settings of the model and its training
        data: settings of the data
        trainer: settings of the trainer
        device: device of this process
        devices: number of identical devices

    Returns:
        Description of the choice, or None if nothing was chosen.

    Raises:
        ConfigError: a single sequence does not fit
    """
    share = data.share(devices).micro_batch
    memory = _memory(device)
    logits = 4 * share * data.seq_len * run.backbone.vocab_size
    if data.micro_batch is not None or memory is None or (device.type == "cpu" and 4 * logits <= memory):
        return None
    data.micro_batch = fitting_micro_batch(run, data, trainer, memory, devices)
    return (
        f"micro-batches of {data.micro_batch} x {data.seq_len:,} tokens, the largest that divides a device's {share} "
        f"sequences and fits its {memory / 2**30:.0f} GiB (data.micro_batch is null)"
    )


def _memory(device: torch.device) -> int | None:
    """Return the total memory of a device, not its free memory, so that identical devices choose alike."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type == "cpu" else None
