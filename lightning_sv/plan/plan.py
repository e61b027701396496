"""Plan of a run: GPU memory, hours, and data read and written."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.errors import ConfigError, expect
from lightning_sv.gpus import Gpu
from lightning_sv.plan.memory import (
    USABLE,
    GpuMemory,
    Parallel,
    StepMemory,
    find_strategy,
    gpu_memory,
    largest_micro_batch,
    step_memory,
)
from lightning_sv.settings.data import DataConfig, divisors
from lightning_sv.settings.model import PretrainConfig

PRECISIONS = ("32-true", "bf16-mixed")
#: other precisions, and one of `PRECISIONS` that takes at least their memory
TAKES_LESS_THAN = {"bf16-true": "32-true", "16-true": "32-true", "16-mixed": "bf16-mixed"}
#: default MFUs without a given or measured one: the range of well-tuned dense models of this size
MFUS = (0.3, 0.4, 0.5)
#: above this, kernels use 64-bit indices; such a micro-batch is long enough for any GPU
MOST_LOGITS = 2**31 - 1


@dataclass(frozen=True)
class Reads:
    """Training data of one rank: sequences, predicted tokens, and bytes of token ids.

    Attributes:
        epochs: passes of all ranks over the corpus; None if it is not prepared and its name has no token count
        prepared: True if the corpus is prepared; otherwise epochs follow from its name, such as sample-10BT
    """

    sequences_per_step: int
    tokens_per_step: int
    bytes_per_step: int
    sequences: int
    tokens: int
    bytes: int
    epochs: float | None
    prepared: bool


@dataclass(frozen=True)
class Plan:
    """Resources of a run; memory in bytes, time in hours.

    Attributes:
        largest_micro_batch: largest micro-batch that divides the GPU's share and fits; None if none does
        hours: (MFU, hours, GPU-hours)
        flops: FLOPs of the full run
        checkpoint: bytes of weights and optimizer state
        device_counts: numbers of GPUs that divide the batch
    """

    model: str
    label: str
    parameters: int
    gpu: str
    gpu_memory: int
    gpus: int
    strategy: str
    precision: str
    activation_checkpointing: bool
    global_batch: int
    micro_batch: int
    micro_batches: int
    seq_len: int
    steps: int
    tokens: int
    memory: GpuMemory
    fits: bool
    largest_micro_batch: int | None
    flops: float
    hours: tuple[tuple[float, float, float], ...]
    checkpoint: int
    reads: Reads
    device_counts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        plain["memory"]["peak"] = self.memory.peak
        plain["hours"] = [{"mfu": mfu, "hours": hours, "gpu_hours": gpu_hours} for mfu, hours, gpu_hours in self.hours]
        return plain


def make_plan(
    run: PretrainConfig,
    data: DataConfig,
    trainer: dict[str, Any],
    gpu: Gpu,
    gpus: int,
    *,
    strategy: str | None = None,
    mfus: tuple[float, ...] = MFUS,
) -> Plan:
    """Plan a run of `fit` on `gpus` GPUs; the corpus need not exist.

    Of the trainer's keys max_steps, precision and strategy matter; `strategy`, one of `STRATEGIES`, replaces the last
    one. Hours are computed for `mfus`, fractions of the peak.
    """
    share = data.share(gpus).micro_batch * data.share(gpus).accumulate
    steps, precision = plan_steps(run, data, trainer), _precision(trainer)
    parallel = find_strategy(trainer, gpus) if strategy is None else _given_strategy(strategy, trainer, gpus)
    expect(parallel.kind != "single" or gpus == 1, "--gpus", gpus, "1 with --strategy single. Use ddp or fsdp.")
    tokens = steps * data.tokens_per_step
    flops = run.flops_per_token(data.seq_len)
    times = [train_hours(tokens, flops, gpus, gpu.peak(precision), mfu) for mfu in mfus]
    step, memory = _memory(run, data, parallel, precision, gpus)
    fitting = _largest(memory, run, data, share, gpu.memory)
    micro = data.micro_batch or fitting or 1
    weights, _, state = step(micro).parts()
    return Plan(
        model=run.backbone.name,
        label=run.label,
        parameters=run.n_params,
        gpu=gpu.name,
        gpu_memory=gpu.memory,
        gpus=gpus,
        strategy=parallel.kind,
        precision=precision,
        activation_checkpointing=run.activation_checkpointing,
        global_batch=data.global_batch,
        micro_batch=micro,
        micro_batches=share // micro,
        seq_len=data.seq_len,
        steps=steps,
        tokens=tokens,
        memory=memory(micro),
        fits=memory(micro).peak <= int(USABLE * gpu.memory),
        largest_micro_batch=fitting,
        flops=tokens * flops,
        hours=tuple((mfu, time, time * gpus) for mfu, time in zip(mfus, times, strict=True)),
        checkpoint=weights + state,
        reads=_reads(data, run.backbone.vocab_size, share, steps),
        device_counts=tuple(divisors(data.global_batch)),
    )


def fitting_micro_batch(
    run: PretrainConfig, data: DataConfig, trainer: dict[str, Any], memory: int, devices: int
) -> int:
    """Return the largest micro-batch that divides the share of each of `devices` and fits in `memory` bytes."""
    precision = TAKES_LESS_THAN.get(str(trainer.get("precision")))
    try:
        memory_of = _memory(run, data, find_strategy(trainer, devices), precision or _precision(trainer), devices)[1]
    except ConfigError as error:
        raise ConfigError(f"data.micro_batch is null and cannot be chosen: {error} Or set data.micro_batch.") from error
    if fitting := _largest(memory_of, run, data, data.share(devices).micro_batch, memory):
        return fitting
    found = f"one sequence of {data.seq_len} tokens takes {memory_of(1).peak / 2**30:.1f} GiB"
    wanted = f"at most {USABLE:.0%} of {memory / 2**30:.1f} GiB"
    hint = "Use a smaller model or data.seq_len, model.activation_checkpointing, or trainer/fsdp on more devices."
    raise ConfigError(f"{run.backbone.name} does not fit: {found}; expected {wanted}. {hint}")


def _memory(
    run: PretrainConfig, data: DataConfig, parallel: Parallel, precision: str, devices: int
) -> tuple[Callable[[int], StepMemory], Callable[[int], GpuMemory]]:
    share, blocks = data.global_batch // devices, run.meta().layers

    @cache
    def step(micro_batch: int) -> StepMemory:
        # DDP bucket views are never freed, like accumulated gradients
        keeps_gradients = micro_batch < share or (parallel.kind == "ddp" and parallel.bucket_view)
        return step_memory(run, micro_batch, data.seq_len, precision=precision, accumulate=keeps_gradients)

    def memory(micro_batch: int) -> GpuMemory:
        return gpu_memory(step(micro_batch), blocks, parallel, devices, accumulate=micro_batch < share)

    return step, memory


def _largest(
    memory: Callable[[int], GpuMemory], run: PretrainConfig, data: DataConfig, share: int, total: int
) -> int | None:
    most = max(1, MOST_LOGITS // (data.seq_len * run.backbone.vocab_size))
    return largest_micro_batch(lambda size: memory(size).peak, share, int(USABLE * total), most)


def plan_steps(run: PretrainConfig, data: DataConfig, trainer: dict[str, Any]) -> int:
    """Return the optimizer steps of a run: trainer.max_steps, or those of the token budget."""
    epochs = str(trainer.get("max_epochs"))
    expect(epochs in ("None", "-1"), "trainer.max_epochs", epochs, "null; only `fit` counts epochs. Set max_steps.")
    max_steps = str(trainer.get("max_steps", -1))  # text on the command line
    if max_steps == "-1":
        return run.steps_for_budget(data.tokens_per_step)
    fits = max_steps.isdecimal() and int(max_steps) >= 1
    expect(fits, "trainer.max_steps", max_steps, "at least 1, or -1 to follow model.tokens_per_param.")
    return int(max_steps)


def _given_strategy(strategy: str, trainer: dict[str, Any], gpus: int) -> Parallel:
    try:
        configured = find_strategy(trainer, gpus)
    except ConfigError:  # the trainer's strategy cannot be planned
        return Parallel(strategy)
    return configured if configured.kind == strategy else Parallel(strategy)


def _precision(trainer: dict[str, Any]) -> str:
    text = str(trainer.get("precision") or "32-true")
    precision = {"32": "32-true"}.get(text, text)
    expect(precision in PRECISIONS, "trainer.precision", text, f"{' or '.join(PRECISIONS)} for a plan.")
    return precision


def _reads(data: DataConfig, vocab_size: int, share: int, steps: int) -> Reads:
    manifest = data.manifest if (Path(data.corpus.dir).expanduser() / FILENAME).is_file() else None
    width = np.dtype(manifest.dtype if manifest else "uint16" if vocab_size <= 1 << 16 else "uint32").itemsize
    size = (data.seq_len + 1) * width
    epochs = None
    if manifest and (sequences := manifest.train.sequences(data.seq_len)):
        epochs = steps * data.global_batch / sequences
    elif manifest is None and (named := re.search(r"(\d+)BT$", data.corpus.hf_subset or "")):
        epochs = steps * data.tokens_per_step / (int(named[1]) * 1e9)
    return Reads(
        share, share * data.seq_len, share * size, steps * share, steps * share * data.seq_len, steps * share * size,
        epochs, manifest is not None,
    )  # fmt: skip


def train_hours(tokens: int, flops_per_token: float, gpus: int, peak: float, mfu: float) -> float:
    """Return tokens x FLOPs per token / (GPUs x peak x MFU), in hours.

    `peak` is the FLOP/s of one GPU. `mfu` is the fraction of it that the model's FLOPs of forward and backward reach,
    without recomputation (arXiv:2204.02311).
    """
    expect(0 < mfu <= 1, "--mfu", mfu, "a number above 0 and at most 1 (0.4 is 40%).")
    return tokens * flops_per_token / (gpus * peak * mfu) / 3600


def measured_mfu(logged: tuple[NDArray[np.int64], NDArray[np.float64]] | None) -> float:
    """Return the harmonic mean of throughput/mfu after 10% of the tokens, which gives the run's time.

    `logged` has tokens (N,) and values (N,), and is None if the run logged none.

    Raises:
        ConfigError: there are too few values, or not all are above 0
    """
    tokens, values = logged or (np.zeros(0, np.int64), np.zeros(0))
    warm = values[tokens > tokens[-1] / 10] if len(tokens) > 1 else values[:0]
    if not len(warm) or not (warm > 0).all():
        raise ConfigError("--run has too few positive throughput/mfu; expected a run on a GPU. Pass --mfu instead.")
    return float(len(warm) / (1 / warm).sum())
