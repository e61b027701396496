"""The largest micro-batch that fits the memory of a device."""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from lightning_sv.errors import ConfigError, expect
from lightning_sv.plan.gpu_memory import USABLE, GpuMemory, gpu_memory
from lightning_sv.plan.parallel import Parallel, find_strategy
from lightning_sv.plan.step_memory import StepMemory, memory_between_steps, step_memory
from lightning_sv.settings.data import DataConfig, divisors
from lightning_sv.settings.model import PretrainConfig

if TYPE_CHECKING:
    from lightning_sv.plan.compiled_memory import CompiledActivations

PRECISIONS = ("32-true", "bf16-mixed")
#: above this, kernels use 64-bit indices; such a micro-batch is long enough for any GPU
MOST_LOGITS = 2**31 - 1


class RunMemory:
    """Memory of a run as a function of its micro-batch; each size is simulated once."""

    def __init__(
        self,
        run: PretrainConfig,
        data: DataConfig,
        parallel: Parallel,
        precision: str,
        devices: int,
    ):
        self.run = run
        self.data = data
        self.parallel = parallel
        self.precision = precision
        self.devices = devices
        self.share = data.global_batch // devices  # sequences per device and step
        self._blocks = run.plan.meta().layers
        self.step = cache(self._step)

    def _step(self, micro_batch: int) -> StepMemory:
        """Simulate a step on one device with the full model."""
        if self.run.compile != "none":
            activations = self._compiled_activations.peak(micro_batch)
            return replace(self._between_steps, activations=activations)
        # DDP bucket views are never freed, like accumulated gradients
        has_views = self.parallel.kind == "ddp" and self.parallel.bucket_view
        return step_memory(
            self.run,
            micro_batch,
            self.data.seq_len,
            precision=self.precision,
            accumulate=has_views or micro_batch < self.share,
        )

    @cached_property
    def _between_steps(self) -> StepMemory:
        return memory_between_steps(self.run)

    @cached_property
    def _compiled_activations(self) -> "CompiledActivations":
        # imported here, because it imports torch's compiler, which takes seconds
        from lightning_sv.plan.compiled_memory import CompiledActivations

        return CompiledActivations(self.run, self.data.seq_len, self.precision)

    def of_gpu(self, micro_batch: int) -> GpuMemory:
        """Return the memory of one GPU."""
        accumulate = micro_batch < self.share
        step = self.step(micro_batch)
        return gpu_memory(step, self._blocks, self.parallel, self.devices, accumulate=accumulate)

    def peak(self, micro_batch: int) -> int:
        """Return the bytes of one GPU at the peak of a step."""
        return self.of_gpu(micro_batch).peak

    def largest_micro_batch(self, memory: int) -> int | None:
        """Return the largest divisor of the share that fits in `memory` bytes, or None."""
        logits = self.data.seq_len * self.run.backbone.vocab_size
        sizes = divisors(self.share)
        n_possible = bisect_right(sizes, max(1, MOST_LOGITS // logits))
        return largest_fitting(sizes[:n_possible], self.peak, int(USABLE * memory))


def largest_fitting(sizes: list[int], peak: Callable[[int], int], limit: int) -> int | None:
    """Return the largest micro-batch of ascending `sizes` whose peak is within `limit`, or None.

    `peak` returns bytes of a micro-batch. Bisection, because memory grows with the micro-batch,
    though not in proportion (the loss is chunked). The largest is tried first, because the full
    share needs no accumulated gradients and may take less memory than half of it.
    """
    *smaller, largest = sizes
    if peak(largest) <= limit:
        return largest
    n_fitting = bisect_right(smaller, limit, key=peak)
    return smaller[n_fitting - 1] if n_fitting else None


def plan_precision(trainer: dict[str, Any]) -> str:
    """Return trainer.precision, one of `PRECISIONS`."""
    precision = str(trainer.get("precision") or "32-true")
    if precision == "32":
        precision = "32-true"
    expected = f"{' or '.join(PRECISIONS)} for a plan."
    expect(precision in PRECISIONS, "trainer.precision", precision, expected)
    return precision


def fitting_micro_batch(
    run: PretrainConfig, data: DataConfig, trainer: dict[str, Any], memory: int, devices: int
) -> int:
    """Return the largest micro-batch that fits in `memory` bytes.

    It divides the share of each of `devices`.

    Raises:
        ConfigError: not even one sequence fits, or the strategy or precision is unknown
    """
    try:
        takes_less = trainer.get("precision") == "bf16-true"
        precision = "32-true" if takes_less else plan_precision(trainer)
        run_memory = RunMemory(run, data, find_strategy(trainer, devices), precision, devices)
    except ConfigError as error:
        found = f"data.micro_batch is null and cannot be chosen: {error}"
        raise ConfigError(f"{found} Or set data.micro_batch.") from error

    size = run_memory.largest_micro_batch(memory)
    if size is not None:
        return size
    gib = run_memory.peak(1) / 2**30
    found = f"one sequence of {data.seq_len} tokens takes {gib:.1f} GiB"
    expected = f"at most {USABLE:.0%} of {memory / 2**30:.1f} GiB"
    hint = (
        "Use a smaller model or data.seq_len, model.activation_checkpointing, or trainer/fsdp on "
        "more devices."
    )
    raise ConfigError(f"{run.backbone.name} does not fit: {found}; expected {expected}. {hint}")


def choose_micro_batch(
    run: PretrainConfig,
    data: DataConfig,
    trainer: dict[str, Any],
    device: torch.device,
    devices: int,
) -> tuple[DataConfig, str | None]:
    """Return `data` with the largest micro-batch that fits, and a description of the choice.

    It is chosen for a GPU, or for a CPU with a large per-device batch. Otherwise the batch is one
    micro-batch, and the description is None. Only the order of sums and the experts' balance loss
    depend on it, so a resumed run may change it.
    """
    share = data.share(devices).micro_batch  # refuses devices that cannot share a step
    if data.micro_batch is not None:
        return data, None
    memory = _total_memory(device)
    logits_bytes = share * data.seq_len * run.backbone.vocab_size * 4  # float32
    is_small = logits_bytes <= memory / 4
    if device.type != "cuda" and is_small:
        return data, None
    micro_batch = fitting_micro_batch(run, data, trainer, memory, devices)
    batch = f"{micro_batch} x {data.seq_len:,} tokens"
    text = (
        f"micro-batches of {batch}, the largest that divides a device's {share} sequences "
        f"and fits its {memory / 2**30:.0f} GiB (data.micro_batch is null)"
    )
    return replace(data, micro_batch=micro_batch), text


def _total_memory(device: torch.device) -> int:
    """Return all bytes, not the free ones, so that identical devices choose the same size."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
