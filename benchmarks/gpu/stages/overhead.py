"""Stages 3, 4 and 5: time, memory and speed of training steps, strategies or peers in one process.

In the paper's protocol (2 x 4,096 tokens at 1B, including the optimizer), and with a large micro-batch.
"""

import gc
import time
from typing import Any

import torch
import torch._dynamo

from benchmarks.gpu.clock import USABLE, Clock, clock_of
from benchmarks.gpu.peers import PEERS, Missing, peer
from benchmarks.gpu.process import Task
from benchmarks.gpu.rounds import interleaved, ratios
from benchmarks.gpu.sizes import ARMS, Size, size_of
from benchmarks.gpu.trainee import Trainee, ours, prepare_compiler
from lightning_sv.nn import meta_backbone

#: weights, gradients and two moments in float32
STATE_BYTES = 16


def run(task: Task) -> dict[str, Any]:
    """Time the arms of options['size'] at options['batches']; options['arms'] are strategies or peers."""
    prepare_compiler()
    clock, size = clock_of(task.device), size_of(task.options["size"], task.toy)
    names = task.options.get("arms", ARMS)
    batches: list[str] = list(task.options.get("batches", size.batches))
    found: dict[str, Any] = {"model": size.config.name, "seq_len": size.seq_len, "arms": {}, "left_out": {}}
    needed = STATE_BYTES * sum(p.numel() for p in meta_backbone(size.config).parameters())
    if needed > USABLE * clock.total_bytes():
        found["left_out"][size.config.name] = f"its training state alone is {needed / 2**30:.0f} GiB"
        return found
    for number, batch in enumerate(batches):
        seconds = task.left * (0.9 / (len(batches) - number))
        _one_batch(task, clock, size, batch, names, found, time.monotonic() + seconds)
        _forget(clock)
    # More graphs than models and micro-batches, or graph breaks, would show a difference from `fit`.
    found["dynamo"] = {key: dict(torch._dynamo.utils.counters[key]) for key in ("stats", "graph_break")}
    return found


def _one_batch(
    task: Task, clock: Clock, size: Size, batch: str, names: list[str], found: dict[str, Any], until: float
) -> None:
    """Build the arms one by one, measure their peaks, then time them interleaved."""
    table: dict[str, Any] = {"micro_batch": size.batches[batch], "tokens": size.batches[batch] * size.seq_len}
    found["arms"][batch] = table
    _first_product(clock)
    trainees: dict[str, Trainee] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        if trainees and task.left < 0.2 * task.seconds:
            found["left_out"][f"{name}, {batch}"] = "no time was left to build it"
            continue
        before = clock.held()
        try:
            trainees[name], rows[name] = _built(name, size, size.batches[batch], clock, task.toy, before)
            # Save a first result, in case the next one takes all the time.
            pair = {key: trainees[key].step for key in (next(iter(trainees)), name)}
            _note(rows, interleaved(pair, clock, rounds=1, each=1), trainees, task.options)
        except (torch.OutOfMemoryError, Missing) as error:
            found["left_out"][f"{name}, {batch}"] = " ".join(str(error).split())[:200]
            trainees.pop(name, None)
        except Exception as error:
            found["left_out"][f"{name}, {batch}"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            trainees.pop(name, None)
        _forget(clock)
        table["rows"] = rows
        task.save(found)
    if not trainees:
        return
    slowest = max(row["warm_ms"] for row in rows.values())
    each = 1 if task.toy else max(2, min(10, round(600 / slowest)))
    table |= {"reference": next(iter(trainees)), "steps_a_turn": each}
    times: dict[str, list[float]] = {name: [] for name in trainees}
    for _ in range(1 if task.toy else 8):
        began = time.monotonic()
        try:
            more = interleaved({name: trainees[name].step for name in trainees}, clock, rounds=1, each=each)
        except torch.OutOfMemoryError:  # the remaining memory suffices for one arm, not for another
            name, _ = trainees.popitem()
            found["left_out"][f"{name}, {batch}"] = "it and all before it do not fit; timed beside the first alone"
            times = {name: [] for name in trainees}
            _forget(clock)
            if trainees:
                continue
            return
        for name, values in more.items():
            times[name] += values
        _note(rows, times, trainees, task.options)
        task.save(found)
        if time.monotonic() + 1.1 * (time.monotonic() - began) > until:
            break


def _note(
    rows: dict[str, dict[str, Any]], times: dict[str, list[float]], trainees: dict[str, Trainee], options: Any
) -> None:
    """Add times, relative to the first arm."""
    for name, row in ratios(times, next(iter(times))).items():
        rows[name] |= row | _speed(trainees[name], row["ms"], options)


def _built(name: str, size: Size, batch: int, clock: Clock, toy: bool, before: int) -> tuple[Trainee, dict[str, Any]]:
    """Build one arm, run its first steps, and measure its peak above `before`."""
    began = time.monotonic()
    trainee = build(name, size, batch, clock, toy)
    clock.wait()
    made = time.monotonic()
    clock.times(trainee.step, 1)
    first = time.monotonic() - made
    clock.times(trainee.step, 1)
    warm = clock.times(trainee.step, 1)[0]
    row = {"build_s": round(made - began, 1), "first_step_s": round(first, 1), "warm_ms": warm}
    row["peak_mib"] = round((clock.peak(trainee.step) - before) / 2**20)
    row["parameters"] = sum(p.numel() for p in trainee.model.parameters())
    return trainee, row


def build(name: str, size: Size, batch: int, clock: Clock, toy: bool) -> Trainee:
    """Return the peer or strategy of this name; toy sizes are not compiled."""
    if name in PEERS:
        return peer(name, size, batch, clock.device, compile_it=not toy)
    return ours(name, size, batch, clock.device, "none" if toy else "block")


def _speed(trainee: Trainee, ms: float, options: dict[str, Any]) -> dict[str, float]:
    """Return tokens/s, TFLOP/s of the model's FLOPs, and their fractions of the listed and measured peak."""
    tflops = trainee.flops / ms / 1e9
    speed = {"tokens_per_s": 1e3 * trainee.tokens / ms, "tflops": tflops}
    for key, peak in (("mfu", options.get("peak_tflops")), ("mfu_measured", options.get("measured_tflops"))):
        if peak:
            speed[key] = tflops / peak
    return speed


def _first_product(clock: Clock) -> None:
    """Let cuBLAS allocate its workspaces for forward and backward before memory is compared."""
    a = torch.randn(64, 64, device=clock.device, dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()
    clock.wait()


def _forget(clock: Clock) -> None:
    gc.collect()
    clock.free()


def warm(task: Task) -> dict[str, Any]:
    """Compile the code of `run` with one block, to fill the cache; return cold seconds."""
    prepare_compiler()
    clock = clock_of(task.device)
    size = size_of(task.options["size"], task.toy)
    name = task.options["arm"]
    if name not in PEERS:  # peers are compiled as a single graph
        size = size.shallow()
    trainee = build(name, size, size.batches[task.options["batch"]], clock, task.toy)
    took: list[float] = []
    for _ in range(2):
        began = time.monotonic()
        trainee.step()
        clock.wait()
        took.append(round(time.monotonic() - began, 2))
    return {"first_step_s": took[0], "second_step_s": took[1]}
