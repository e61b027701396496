"""Sharded tensors of FSDP2, detected without importing DTensor, which takes a second."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return True if this process may hold only a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, by a collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full
