"""Device time of a step by kind of kernel, and of each generated kernel its bytes and bandwidth.

Inductor writes the bytes that a kernel must move into its code (each buffer once), if asked for it
by `benchmark_kernel`; the bandwidth is these bytes over the measured time.
"""

import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.process import Task
from benchmarks.gpu.sizes import size_of
from benchmarks.gpu.stages.cache import VARIABLE
from benchmarks.gpu.trainee import Trainee, ours, prepare_compiler

#: kind -> parts of a kernel's name (on a CPU, of an operator's); the first match counts
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|sdpa|cudnn.*sdp"),
    (
        "products",
        r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|gemv|aten::(mm|addmm|bmm|linear|_grouped_mm)|mkldnn",
    ),
    ("optimizer, clip", r"multi_tensor|adam|_foreach_|lpnorm"),
    ("copies", r"memcpy|memset"),
    ("compiled", r"triton_|inductor"),
)
#: spans that contain kernels in the profiler's output
SPANS = re.compile(
    r"^(##|Optimizer|Torch-Compiled|ProfilerStep|autograd::|nccl:|Pregraph|Context Sync)"
)
STEPS = 3
MOST_ROWS = 40
#: bytes and name of a kernel in the code that Inductor writes
GENERATED = re.compile(
    r"'kernel_num_gb': (?P<gb>[\d.e+-]+).*?def (?P<name>triton_\w+)\(", re.DOTALL
)


def run(task: Task) -> dict[str, Any]:
    """Profile options['arms'] at options['size'], one after the other."""
    prepare_compiler()
    clock = clock_of(task.device)
    name = task.options["size"]
    size = size_of(name, task.toy)
    found: dict[str, Any] = {}
    for arm in task.options["arms"]:
        label = f"{name} {arm}"
        how = "none" if task.toy else "block"
        try:
            trainee = ours(
                arm,
                size,
                size.batches["protocol"],
                clock.device,
                compile=how,
                inductor={"benchmark_kernel": True},
            )
            found[label] = by_kind(trainee, clock)
            del trainee
        except Exception as error:
            found[label] = {
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            }
        clock.free()
        task.save(found)
    return found


def by_kind(trainee: Trainee, clock: Clock) -> dict[str, Any]:
    """Return milliseconds per step of each kind, gaps, kernels per step, the largest kernels."""
    for _ in range(3):
        trainee.step()
    clock.wait()
    with profile(activities=list(clock.activities)) as profiler:
        wall = sum(clock.times(trainee.step, STEPS)) / STEPS
    rows = _kernel_rows(profiler, on_cuda=clock.device.type == "cuda")
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds[row["kind"]] += row["ms"]
    return {
        "step_ms": wall,
        "ms": dict(kinds.most_common()),
        "gaps_ms": wall - sum(kinds.values()),
        "kernels": sum(row["launches"] for row in rows),
        "largest": sorted(rows, key=lambda row: -row["ms"])[:MOST_ROWS],
    }


def _kernel_rows(profiler: Any, *, on_cuda: bool) -> list[dict[str, Any]]:
    """Return name, kind, launches, milliseconds per step and bandwidth of each kernel."""
    gigabytes = bytes_of_generated_kernels()
    rows = []
    for event in profiler.key_averages():
        is_on_device = event.device_type == torch.autograd.DeviceType.CUDA
        is_span = getattr(event, "is_user_annotation", False) or SPANS.match(event.key)
        if on_cuda != is_on_device or is_span:
            continue
        microseconds = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if not microseconds:
            continue
        row = {"name": event.key[:90], "kind": kind_of(event.key)}
        row["ms"] = microseconds / 1e3 / STEPS
        row["launches"] = event.count / STEPS
        if event.key in gigabytes:
            row["gb"] = gigabytes[event.key] * row["launches"]
            row["tb_s"] = row["gb"] / row["ms"]
        rows.append(row)
    return rows


def bytes_of_generated_kernels() -> dict[str, float]:
    """Return the gigabytes that each kernel of Inductor's folder moves per launch.

    Kernels of different graphs may have one name; such a name is left out if their bytes differ.
    """
    sizes: dict[str, set[float]] = defaultdict(set)
    for path in Path(os.environ[VARIABLE]).rglob("*.py"):
        source = path.read_text(errors="replace")
        for match in GENERATED.finditer(source):
            sizes[match["name"]].add(float(match["gb"]))
    return {name: values.pop() for name, values in sizes.items() if len(values) == 1}


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next(
        (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "eager"
    )
