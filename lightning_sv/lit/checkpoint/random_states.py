"""States of the random generators of all ranks."""

import random
from typing import Any

import numpy as np
import torch
from torch import distributed


def rng_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of torch, Python, NumPy and a CUDA `device` of every rank; a collective."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    here = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if device.type == "cuda":
        here["cuda"] = torch.cuda.get_rng_state(device)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [here]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, here)
    return states


def restore_rng(states: list[dict[str, Any]], rank: int, device: torch.device) -> None:
    """Set the generators of this rank; a rank without a saved state keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
