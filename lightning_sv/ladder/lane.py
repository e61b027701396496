"""A lane: one CUDA stream with a memory pool, and the functions recorded on it. On the CPU, plain calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lane:
    """Work in order on one stream, beside that of other lanes.

    The graphs of a lane share its pool: they never run at the same time, and what outlives a step lies outside of it,
    or is referenced as long as the graph. Lanes share none.

    Args:
        device: 'cuda', or 'cpu', where functions are called and nothing is recorded
        graphs: False calls them on CUDA as well: slower, and what goes wrong says where
    """

    def __init__(self, device: torch.device, *, graphs: bool = True):
        self.cuda = device.type == "cuda"
        self._graphs = graphs and self.cuda
        self.stream: Any = torch.cuda.Stream(device) if self.cuda else None
        self._pool: Any = torch.cuda.graph_pool_handle() if self.cuda else None
        self._marks: list[Any] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the work of the block on this lane's stream, after what was put on the default stream before."""
        if not self.cuda:
            yield
            return
        self.stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self.stream):
            yield

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return what repeats `step`: a graph's replay, to be called while the lane is active.

        `step` must have run before (kernels are chosen and compiled then), read and write tensors that stay where
        they are, and never ask the device for a value. Recording does not execute it.
        """
        if not self._graphs:
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            step()
        return graph.replay

    def mark(self) -> None:
        """Remember this point of the lane's work."""
        if self.cuda:
            self._marks.append(self.stream.record_event())

    def keep_up(self, behind: int) -> None:
        """Wait until at most `behind` marks are not reached: the host runs ahead by so many rounds."""
        while len(self._marks) > behind:
            self._marks.pop(0).synchronize()
