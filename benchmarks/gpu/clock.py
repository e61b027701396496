"""Clocks of a device: CUDA events and allocator counters, or wall time on a CPU."""

import itertools
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

#: fraction of a GPU's memory available to tensors; the context, cuBLAS and fragmentation use the
#: rest
USABLE = 0.92


class Clock:
    """Time and memory of a CUDA device.

    Args:
        device: 'cuda', or 'cpu' for the CPU version.
    """

    def __init__(self, device: str):
        self.device = torch.device(device)

    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def name(self) -> str:
        """Name of the GPU."""
        return torch.cuda.get_device_name(self.device)

    def total_bytes(self) -> int:
        """Memory of the GPU."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def wait(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(self.device)

    def times(self, step: Callable[[], object], n: int) -> list[float]:
        """Return the device time of each of n steps in milliseconds, with one synchronization."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.wait()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def held(self) -> int:
        """Return the bytes currently in tensors."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self, step: Callable[[], object]) -> int:
        """Return the peak bytes in tensors during a step."""
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device)

    def free(self) -> None:
        """Release cached memory."""
        torch.cuda.empty_cache()


class _CpuClock(Clock):
    """Wall time; memory is not measured."""

    activities = (ProfilerActivity.CPU,)

    def name(self) -> str:
        return "cpu"

    def total_bytes(self) -> int:
        return 1 << 40

    def wait(self) -> None:
        pass

    def times(self, step: Callable[[], object], n: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(n):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]

    def held(self) -> int:
        return 0

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return 0

    def free(self) -> None:
        pass


def clock_of(device: str) -> Clock:
    """Return the clock of 'cuda' or 'cpu'."""
    return _CpuClock(device) if device == "cpu" else Clock(device)


def median_ms(
    clock: Clock, step: Callable[[], object], *, inner: int = 10, rounds: int = 3, warmup: int = 3
) -> float:
    """Return the median over rounds of the mean milliseconds of `inner` consecutive calls."""
    for _ in range(warmup):
        step()
    clock.wait()

    def several() -> None:
        for _ in range(inner):
            step()

    times = sorted(clock.times(several, rounds))
    return times[len(times) // 2] / inner
