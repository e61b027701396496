"""Bytes that tensors take, counted while operators run, also on tensors without storage."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Bytes of the storages that operators have returned and that are still alive: now, and at most.

    torch.distributed's MemTracker counts the same and names every module's part, at twelve times the cost on
    Llama-1B. What a kernel allocates and frees inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = weakref.finalize(storage, self._freed, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int, size: int) -> None:
        self.now -= size
        del self._alive[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out
