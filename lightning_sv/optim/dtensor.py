"""Tensors that FSDP2 has cut, known by what they can do: the class DTensor costs a second to import."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process may hold a part of `tensor` only."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, a collective; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole
