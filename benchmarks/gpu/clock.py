"""The clock of a device: CUDA events and the allocator's counters, and a twin of them for the CPU."""

import itertools
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity

#: what tensors may take of a card; the context, cuBLAS and fragmentation need the rest
USABLE = 0.92


class Clock:
    """Times and memory of a CUDA device.

    Args:
        device: 'cuda', or 'cpu' for the twin.
    """

    def __init__(self, device: str):
        self.device = torch.device(device)

    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def name(self) -> str:
        """As the card calls itself."""
        return torch.cuda.get_device_name(self.device)

    def total_bytes(self) -> int:
        """Memory of the card."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def wait(self) -> None:
        """Until the device has done all it was given."""
        torch.cuda.synchronize(self.device)

    def times(self, step: Callable[[], object], n: int) -> list[float]:
        """Milliseconds of each of n steps, as the device saw them; the host is held up once, at the end."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.wait()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def held(self) -> int:
        """Bytes in tensors now."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self, step: Callable[[], object]) -> int:
        """Most bytes in tensors during a step."""
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device)

    def free(self) -> None:
        """Give cached memory back."""
        torch.cuda.empty_cache()


class _CpuClock(Clock):
    """Wall time; memory is not counted."""

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


def median_ms(clock: Clock, step: Callable[[], object], *, inner: int = 10, rounds: int = 3, warmup: int = 3) -> float:
    """Median over rounds of the mean time of `inner` calls in a row, milliseconds."""
    for _ in range(warmup):
        step()
    clock.wait()

    def several() -> None:
        for _ in range(inner):
            step()

    times = sorted(clock.times(several, rounds))
    return times[len(times) // 2] / inner
