"""Stage 6: device time of a step by kind of kernel."""

import re
from collections import Counter
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.process import Task
from benchmarks.gpu.sizes import ARMS, size_of
from benchmarks.gpu.stages.overhead import build
from benchmarks.gpu.trainee import Trainee, prepare_compiler

#: kind -> parts of a kernel's name (on a CPU, of an operator's); the first match counts
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|sdpa|cudnn.*sdp"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|gemv|aten::(mm|addmm|bmm|linear|_grouped_mm)|mkldnn"),
    ("optimizer, clip", r"multi_tensor|adam|_foreach_|lpnorm"),
    ("copies", r"memcpy|memset"),
    ("compiled", r"triton_|inductor"),
)
#: spans that contain kernels in the profiler's output
SPANS = re.compile(r"^(##|Optimizer|Torch-Compiled|ProfilerStep|autograd::|nccl:|Pregraph|Context Sync)")
STEPS = 3


def run(task: Task) -> dict[str, Any]:
    """Profile the arms of options['size'], one after the other."""
    prepare_compiler()
    clock, found = clock_of(task.device), dict[str, Any]()
    for name in task.options.get("sizes", ("0.12b", "1b")):
        size = size_of(name, task.toy)
        for arm in task.options.get("arms", ("llama", "unified") if name == "1b" else ARMS):
            label = f"{name} {arm}"
            try:
                trainee = build(arm, size, size.batches["protocol"], clock, task.toy)
                found[label] = by_kind(trainee, clock)
                del trainee
            except Exception as error:
                found[label] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            clock.free()
            task.save(found)
    return found


def by_kind(trainee: Trainee, clock: Clock) -> dict[str, Any]:
    """Return milliseconds per step of each kind, gaps, kernels per step, and the ten largest others."""
    for _ in range(3):
        trainee.step()
    clock.wait()
    with profile(activities=list(clock.activities)) as profiler:
        wall = sum(clock.times(trainee.step, STEPS)) / STEPS
    cuda = clock.device.type == "cuda"
    kinds: Counter[str] = Counter()
    names: dict[str, Counter[str]] = {}
    launches = 0
    for event in profiler.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if cuda != on_device or getattr(event, "is_user_annotation", False) or SPANS.match(event.key):
            continue
        ms = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3 / STEPS
        if not ms:
            continue
        kind = kind_of(event.key)
        kinds[kind] += ms
        names.setdefault(kind, Counter())[event.key[:90]] += ms
        launches += event.count
    busy = sum(kinds.values())
    found: dict[str, Any] = {"step_ms": wall, "ms": dict(kinds.most_common()), "gaps_ms": wall - busy}
    found |= {"kernels": launches / STEPS}
    found["largest"] = {kind: dict(rows.most_common(6)) for kind, rows in names.items()}
    return found


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "eager")
