"""Plan of a run: GPU memory, hours, and data."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightning_sv.errors import ConfigError, expect
from lightning_sv.gpus import Gpu
from lightning_sv.plan.gpu_memory import USABLE, GpuMemory
from lightning_sv.plan.micro_batch import RunMemory, plan_precision
from lightning_sv.plan.parallel import check_compiled, find_strategy
from lightning_sv.settings.data import DataConfig, divisors
from lightning_sv.settings.model import PretrainConfig

#: default MFUs without a given or measured one: the range of well-tuned dense models of this size
MFUS = (0.3, 0.4, 0.5)
#: share of tokens above those that a run needs, because hashes select the validation documents
_MARGIN = 0.01


class Hours(NamedTuple):
    """Time of a run at one MFU (model FLOPs utilization)."""

    mfu: float
    hours: float
    gpu_hours: float


@dataclass(frozen=True)
class Plan:
    """Resources of a run; memory in bytes, time in hours.

    Attributes:
        largest_micro_batch: largest divisor of the GPU's share that fits; None if none does
        hours: a row per MFU
        flops: FLOPs of the full run
        checkpoint: bytes of weights and optimizer state
        epochs: passes over the corpus; None if it is not prepared
        sufficient_tokens: data.corpus.max_tokens with which the run reads no sequence twice
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
    compile: str
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
    hours: tuple[Hours, ...]
    checkpoint: int
    epochs: float | None
    sufficient_tokens: int
    device_counts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        plain["memory"]["peak"] = self.memory.peak
        plain["hours"] = [row._asdict() for row in self.hours]
        return plain


def make_plan(
    run: PretrainConfig,
    data: DataConfig,
    trainer: dict[str, Any],
    gpu: Gpu,
    gpus: int,
    mfus: tuple[float, ...] = MFUS,
) -> Plan:
    """Plan a run of `fit` on `gpus` GPUs; the corpus need not exist.

    Of the trainer's keys max_steps, precision and strategy matter. Hours are computed for `mfus`,
    fractions of the peak.
    """
    data.share(gpus)  # refuses numbers of GPUs that cannot share a step
    steps = plan_steps(run, data, trainer)
    precision = plan_precision(trainer)
    parallel = find_strategy(trainer, gpus)
    check_compiled(run.compile, is_sharded=parallel.kind == "fsdp")

    tokens = steps * data.tokens_per_step
    flops = run.plan.flops_per_token(data.seq_len)
    hours = []
    for mfu in mfus:
        time = train_hours(tokens, flops, gpus, gpu.peak(precision), mfu)
        hours.append(Hours(mfu, time, gpu_hours=time * gpus))

    run_memory = RunMemory(run, data, parallel, precision, gpus)
    largest = run_memory.largest_micro_batch(gpu.memory)
    micro_batch = data.micro_batch or largest or 1
    memory = run_memory.of_gpu(micro_batch)
    state = run_memory.step(micro_batch).parts()
    return Plan(
        model=run.backbone.name,
        label=run.label,
        parameters=run.plan.n_params,
        gpu=gpu.name,
        gpu_memory=gpu.memory,
        gpus=gpus,
        strategy=parallel.kind,
        precision=precision,
        compile=run.compile,
        activation_checkpointing=run.activation_checkpointing,
        global_batch=data.global_batch,
        micro_batch=micro_batch,
        micro_batches=run_memory.share // micro_batch,
        seq_len=data.seq_len,
        steps=steps,
        tokens=tokens,
        memory=memory,
        fits=memory.peak <= int(USABLE * gpu.memory),
        largest_micro_batch=largest,
        flops=tokens * flops,
        hours=tuple(hours),
        checkpoint=state.weights + state.optimizer,
        epochs=data.epochs(tokens) if data.is_prepared else None,
        sufficient_tokens=sufficient_tokens(data, steps),
        device_counts=tuple(divisors(data.global_batch)),
    )


def plan_steps(run: PretrainConfig, data: DataConfig, trainer: dict[str, Any]) -> int:
    """Return the optimizer steps of a run: trainer.max_steps, or those of the token budget."""
    epochs = str(trainer.get("max_epochs"))
    if epochs not in ("None", "-1"):
        expected = "null; only `fit` counts epochs. Set max_steps."
        raise ConfigError(f"trainer.max_epochs is {epochs}; expected {expected}")

    max_steps = str(trainer.get("max_steps", -1))  # text on the command line
    if max_steps == "-1":
        return run.plan.steps_for_budget(data.tokens_per_step)
    if not max_steps.isdecimal() or int(max_steps) < 1:
        expected = "at least 1, or -1 to follow model.tokens_per_param."
        raise ConfigError(f"trainer.max_steps is {max_steps}; expected {expected}")
    return int(max_steps)


def sufficient_tokens(data: DataConfig, steps: int) -> int:
    """Return a data.corpus.max_tokens with which a run of `steps` steps reads no sequence twice.

    It is steps x global_batch x (seq_len + 1) / (1 - val_fraction) and 1%, rounded up to three
    digits.
    """
    train_tokens = steps * data.global_batch * (data.seq_len + 1)
    exact = int(train_tokens / (1 - data.corpus.val_fraction) * (1 + _MARGIN))
    unit = 10 ** max(0, len(str(exact)) - 3)
    return -(-exact // unit) * unit


def train_hours(tokens: int, flops_per_token: float, gpus: int, peak: float, mfu: float) -> float:
    """Return tokens x FLOPs per token / (GPUs x peak x MFU), in hours.

    `peak` is the FLOP/s of one GPU. `mfu` is the fraction of it that the model's FLOPs of forward
    and backward reach, without recomputation (arXiv:2204.02311).
    """
    expect(0 < mfu <= 1, "--mfu", mfu, "a number above 0 and at most 1 (0.4 is 40%).")
    return tokens * flops_per_token / (gpus * peak * mfu) / 3600
