"""Stages 3, 4 and 5: time, memory and speed of training steps, strategies or peers in one process.

In the paper's protocol (2 x 4,096 tokens at 1B, including the optimizer), and with a large
micro-batch.
"""

import gc
import time
from collections.abc import Callable
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


#: returns the model of a name, which may not be compiled yet
Build = Callable[[str, Task, Size, int, Clock], Trainee]


def run(task: Task) -> dict[str, Any]:
    """Time the arms of options['size'] at options['batches']: strategies or peers."""
    clock = clock_of(task.device)
    size = size_of(task.options["size"], task.toy)
    names = list(task.options.get("arms", ARMS))
    batches = list(task.options.get("batches", size.batches))
    return time_arms(task, clock, names, batches, build_arm)


def time_arms(
    task: Task, clock: Clock, names: list[str], batches: list[str], build: Build
) -> dict[str, Any]:
    """Time models of options['size'] interleaved, one micro-batch after the other."""
    prepare_compiler()
    size = size_of(task.options["size"], task.toy)
    found: dict[str, Any] = {
        "model": size.config.name,
        "seq_len": size.seq_len,
        "arms": {},
        "left_out": {},
    }
    needed = STATE_BYTES * sum(p.numel() for p in meta_backbone(size.config).parameters())
    if needed > USABLE * clock.total_bytes():
        found["left_out"][size.config.name] = (
            f"its training state alone is {needed / 2**30:.0f} GiB"
        )
        return found
    for number, batch in enumerate(batches):
        seconds = task.left * (0.9 / (len(batches) - number))
        table = BatchTable(task, clock, size, batch, found, build)
        table.measure(names, until=time.monotonic() + seconds)
        _forget(clock)
    # More graphs than models and micro-batches, or graph breaks, would show a difference from
    # `fit`.
    found["dynamo"] = {
        key: dict(torch._dynamo.utils.counters[key]) for key in ("stats", "graph_break")
    }
    return found


class BatchTable:
    """Models of one size with one micro-batch, in one process.

    Args:
        task: input of the stage
        clock: clock of the device
        size: the size
        batch: name of the micro-batch
        found: results of the stage, to which the table is added
        build: returns the model of a name
    """

    def __init__(
        self, task: Task, clock: Clock, size: Size, batch: str, found: dict[str, Any], build: Build
    ):
        self.task = task
        self.clock = clock
        self.size = size
        self.batch = batch
        self.found = found
        self.build = build
        self.sequences = size.batches[batch]
        self.trainees: dict[str, Trainee] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.table: dict[str, Any] = {
            "micro_batch": self.sequences,
            "tokens": self.sequences * size.seq_len,
        }
        self.table["rows"] = self.rows
        found["arms"][batch] = self.table

    def measure(self, names: list[str], until: float) -> None:
        """Build the models one by one, measure their peaks, then time them interleaved."""
        _first_product(self.clock)
        for name in names:
            self._add(name)
        if self.trainees:
            self._time_rounds(until)

    def _add(self, name: str) -> None:
        """Build a model and save a first result, in case the next one takes all the time."""
        if self.trainees and self.task.left < 0.2 * self.task.seconds:
            self._leave_out(name, "no time was left to build it")
            return
        try:
            self.trainees[name], self.rows[name] = self._built(name)
            first = next(iter(self.trainees))
            pair = {key: self.trainees[key].step for key in (first, name)}
            self._note(interleaved(pair, self.clock, rounds=1, each=1))
        except (torch.OutOfMemoryError, Missing) as error:
            self._leave_out(name, str(error))
        except Exception as error:
            self._leave_out(name, f"{type(error).__name__}: {error}")
        _forget(self.clock)
        self.task.save(self.found)

    def _leave_out(self, name: str, reason: str) -> None:
        self.found["left_out"][f"{name}, {self.batch}"] = " ".join(reason.split())[:300]
        self.trainees.pop(name, None)

    def _built(self, name: str) -> tuple[Trainee, dict[str, Any]]:
        """Build one model, run its first steps, and measure its peak above the memory before."""
        before = self.clock.held()
        began = time.monotonic()
        trainee = self.build(name, self.task, self.size, self.sequences, self.clock)
        self.clock.wait()
        made = time.monotonic()
        self.clock.times(trainee.step, 1)
        first = time.monotonic() - made
        self.clock.times(trainee.step, 1)
        warm = self.clock.times(trainee.step, 1)[0]
        row = {"build_s": round(made - began, 1), "first_step_s": round(first, 1), "warm_ms": warm}
        row["peak_mib"] = round((self.clock.peak(trainee.step) - before) / 2**20)
        row["parameters"] = sum(p.numel() for p in trainee.model.parameters())
        return trainee, row

    def _time_rounds(self, until: float) -> None:
        """Time all models in rounds until the time is over; save after each."""
        slowest = max(self.rows[name]["warm_ms"] for name in self.trainees)
        each = 1 if self.task.toy else max(2, min(10, round(600 / slowest)))
        self.table |= {"reference": next(iter(self.trainees)), "steps_a_turn": each}
        times: dict[str, list[float]] = {name: [] for name in self.trainees}
        for _ in range(1 if self.task.toy else 8):
            began = time.monotonic()
            more = self._round(each)
            if more is None:
                times = {name: [] for name in self.trainees}
                continue
            for name, values in more.items():
                times[name] += values
            self._note(times)
            self.task.save(self.found)
            took = time.monotonic() - began
            if time.monotonic() + 1.1 * took > until:
                return

    def _round(self, each: int) -> dict[str, list[float]] | None:
        """Time all models once; None if they do not fit together, then the last one is left out."""
        steps = {name: trainee.step for name, trainee in self.trainees.items()}
        try:
            return interleaved(steps, self.clock, rounds=1, each=each)
        except torch.OutOfMemoryError:
            steps.clear()
            self._leave_out(
                next(reversed(self.trainees)),
                "it and all before it do not fit; timed with the first alone",
            )
            _forget(self.clock)
            return None

    def _note(self, times: dict[str, list[float]]) -> None:
        """Add times, relative to the first model."""
        for name, row in ratios(times, next(iter(times))).items():
            self.rows[name] |= row | _speed(self.trainees[name], row["ms"], self.task.options)


def build_arm(name: str, task: Task, size: Size, batch: int, clock: Clock) -> Trainee:
    """Return the peer or strategy of this name; toy sizes are not compiled."""
    if name in PEERS:
        return peer(name, size, batch, clock.device, compile_it=not task.toy)
    return ours(name, size, batch, clock.device, compile="none" if task.toy else "block")


def _speed(trainee: Trainee, ms: float, options: dict[str, Any]) -> dict[str, float]:
    """Return tokens/s, TFLOP/s of the model, and their fractions of both peaks."""
    tflops = trainee.flops / ms / 1e9
    speed = {"tokens_per_s": 1e3 * trainee.tokens / ms, "tflops": tflops}
    for key, peak in (
        ("mfu", options.get("peak_tflops")),
        ("mfu_measured", options.get("measured_tflops")),
    ):
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
    trainee = build_arm(name, task, size, size.batches[task.options["batch"]], clock)
    took: list[float] = []
    for _ in range(2):
        began = time.monotonic()
        trainee.step()
        clock.wait()
        took.append(round(time.monotonic() - began, 2))
    return {"first_step_s": took[0], "second_step_s": took[1]}
