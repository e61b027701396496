"""Exact memory of a training step: saved for backward, and peak."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def saved_mib(loss: Callable[[], Tensor], model: nn.Module) -> float:
    """Return the memory saved for backward in MiB, without parameters and buffers.

    Run a step before, so that nothing is compiled here.
    """
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # keep the tensors, so that addresses are not reused

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    total = sum(
        tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in held
    )
    kept.clear()
    value.backward()
    model.zero_grad(set_to_none=True)
    return total / 2**20


def peak_mib(step: Callable[[], object]) -> float:
    """Return the peak memory of a step above the previous level, in MiB.

    Includes activations, buffers and gradients; computed from the allocator's events, so it is
    exact and does not depend on resident memory.
    """
    step()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events)) / 2**20
