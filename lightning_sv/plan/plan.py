"""The plan of a run: what one GPU holds, how long it takes, what it writes and reads."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.errors import ConfigError
from lightning_sv.nn.gpus import Gpu
from lightning_sv.plan.device import USABLE, GpuMemory, Parallel, find_strategy, gpu_memory, largest_micro_batch
from lightning_sv.plan.memory import StepMemory, step_memory
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig

PRECISIONS = ("32-true", "bf16-mixed")
#: shares of the peak shown where none is given or measured: what well-tuned dense models of this size span
MFUS = (0.3, 0.4, 0.5)
#: beyond it kernels count in 64 bits, and a micro-batch is long enough to keep any GPU busy
MOST_LOGITS = 2**31 - 1


@dataclass(frozen=True)
class Reads:
    """What one rank reads for training: sequences, tokens it predicts, and bytes of token ids.

    Attributes:
        epochs: passes of all ranks over the corpus; None where it is not prepared and no name says its tokens
        prepared: whether the corpus is; else the epochs are by its name, such as sample-10BT
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
    """What a run takes; memory in bytes, time in hours.

    Attributes:
        largest_micro_batch: the largest that divides the GPU's share of the batch and fits; None if none does
        hours: (MFU, hours, GPU-hours)
        flops: of the whole run
        checkpoint: bytes of weights and optimizer state
        device_counts: numbers of GPUs that the batch can be shared by
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
        """Plain values for JSON."""
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
    """Plan the run that `fit` would make of these on `gpus` GPUs.

    Args:
        run: what is trained
        data: its corpus need not be there
        trainer: the trainer's keys; of them count max_steps, precision and strategy
        gpu: kind of GPU, all alike
        gpus: number of GPUs
        strategy: one of `STRATEGIES`; None for the trainer's
        mfus: shares of the peak to give the hours for

    Raises:
        ConfigError: what `fit` would refuse about batch, steps or precision, or a strategy that is not planned for
    """
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}; expected at least 1.")
    share = data.share(gpus).micro_batch * data.share(gpus).accumulate
    steps, precision = plan_steps(run, data, trainer), _precision(trainer)
    parallel = find_strategy(trainer, gpus) if strategy is None else _given_strategy(strategy, trainer, gpus)
    if parallel.kind == "single" and gpus > 1:
        raise ConfigError(f"--strategy single holds the model on one GPU, and --gpus is {gpus}; use ddp or fsdp.")
    tokens = steps * data.tokens_per_step
    flops = run.flops_per_token(data.seq_len)
    hours = tuple((mfu, train_hours(tokens, flops, gpus, gpu.peak(precision), mfu)) for mfu in mfus)

    step, memory = _memory(run, data, parallel, precision, gpus)
    fitting = _largest(memory, run, data, share, gpu.memory)
    micro = data.micro_batch or fitting or 1
    weights, _, state = step(micro).parts()
    return Plan(
        model=run.config.name,
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
        hours=tuple((mfu, each, each * gpus) for mfu, each in hours),
        checkpoint=weights + state,
        reads=_reads(data, run.config.vocab_size, share, steps),
        device_counts=data.device_counts,
    )


def fitting_micro_batch(
    run: PretrainConfig, data: DataConfig, trainer: dict[str, Any], memory: int, devices: int
) -> int:
    """Return the micro-batch of a run that gives none: the largest that divides a device's share and fits.

    Args:
        run: what is trained
        data: what it reads; its micro_batch is None
        trainer: the trainer's keys; of them count precision and strategy
        memory: bytes of a device
        devices: number of devices, all alike

    Raises:
        ConfigError: not one sequence fits, or precision or strategy are not planned for
    """
    share = data.share(devices).micro_batch
    try:
        of = _memory(run, data, find_strategy(trainer, devices), _precision(trainer), devices)[1]
    except ConfigError as error:
        raise ConfigError(f"data.micro_batch is null, to be the largest that fits: {error} Or set it.") from error
    if fitting := _largest(of, run, data, share, memory):
        return fitting
    raise ConfigError(
        f"{run.config.name} does not fit: one sequence of {data.seq_len} tokens takes {of(1).peak / 2**30:.1f} GiB "
        f"of a device, and {USABLE:.0%} of {memory / 2**30:.1f} GiB are for tensors; use a smaller model or "
        "data.seq_len, model.activation_checkpointing, or trainer/fsdp on more devices."
    )


def _memory(
    run: PretrainConfig, data: DataConfig, parallel: Parallel, precision: str, devices: int
) -> tuple[Callable[[int], StepMemory], Callable[[int], GpuMemory]]:
    """Memory by micro-batch: of a whole model's step, and of one device."""
    share, blocks = data.global_batch // devices, run.meta().layers

    @cache
    def step(micro_batch: int) -> StepMemory:
        # views of DDP's buckets are gradients that are never freed, as in accumulation
        kept = micro_batch < share or (parallel.kind == "ddp" and parallel.bucket_view)
        return step_memory(run, micro_batch, data.seq_len, precision=precision, accumulate=kept)

    def memory(micro_batch: int) -> GpuMemory:
        return gpu_memory(step(micro_batch), blocks, parallel, devices, accumulate=micro_batch < share)

    return step, memory


def _largest(
    memory: Callable[[int], GpuMemory], run: PretrainConfig, data: DataConfig, share: int, total: int
) -> int | None:
    """The largest micro-batch that fits, with logits that a kernel numbers with 32 bits."""
    most = max(1, MOST_LOGITS // (data.seq_len * run.config.vocab_size))
    return largest_micro_batch(lambda size: memory(size).peak, share, int(USABLE * total), most)


def plan_steps(run: PretrainConfig, data: DataConfig, trainer: dict[str, Any]) -> int:
    """Return the optimizer steps of a run: trainer.max_steps, or those of the token budget.

    Raises:
        ConfigError: trainer.max_steps is neither -1 nor positive
    """
    given = str(trainer.get("max_steps", -1))  # text, where it comes from the command line
    if given == "-1":
        return run.steps_for_budget(data.tokens_per_step)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"trainer.max_steps is {given}; expected at least 1, or -1 for the budget.")
    return int(given)


def _given_strategy(strategy: str, trainer: dict[str, Any], gpus: int) -> Parallel:
    """The strategy asked for, with what the trainer says of it."""
    try:
        said = find_strategy(trainer, gpus)
    except ConfigError:  # one that is not planned for: the given one is the way out
        return Parallel(strategy)
    return said if said.kind == strategy else Parallel(strategy)


def _precision(trainer: dict[str, Any]) -> str:
    given = str(trainer.get("precision") or "32-true")
    precision = {"32": "32-true"}.get(given, given)
    if precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision {given} is not planned for; use {' or '.join(PRECISIONS)}.")
    return precision


def _reads(data: DataConfig, vocab_size: int, share: int, steps: int) -> Reads:
    manifest = data.manifest if (Path(data.corpus.dir) / FILENAME).is_file() else None
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
    """Tokens x FLOPs a token / (GPUs x peak x MFU), in hours.

    Args:
        tokens: of the run
        flops_per_token: of forward and backward (`lightning_sv.nn.flops_per_token`)
        gpus: number of GPUs
        peak: FLOP/s of one
        mfu: share of the peak that the model's FLOPs reach, recomputation not counted (arXiv:2204.02311)

    Raises:
        ConfigError: mfu is no share
    """
    if not 0 < mfu <= 1:
        raise ConfigError(f"the MFU is {mfu}; expected a number above 0 and at most 1 (0.4 is 40%).")
    return tokens * flops_per_token / (gpus * peak * mfu) / 3600


def measured_mfu(tokens: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """Harmonic mean of throughput/mfu after the first tenth of the tokens: the share that gives the run's time.

    Args:
        tokens: (N,) training tokens of each value
        values: (N,) the MFU since the value before

    Raises:
        ConfigError: no value is left, or one is not positive
    """
    warm = values[tokens > tokens[-1] / 10] if len(tokens) > 1 else values[:0]
    if not len(warm) or not (warm > 0).all():
        raise ConfigError("the run of --run logged too few positive values of throughput/mfu; give --mfu instead.")
    return float(len(warm) / (1 / warm).sum())
