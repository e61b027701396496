"""An eager float32 copy of our backbone, so that training may be compiled or sharded."""

import torch
from torch import Tensor, nn

from lightning_sv.nn import Backbone
from lightning_sv.optim import full_tensor


def plain_copy(
    source: nn.Module, meta: Backbone, device: torch.device, *, keep: bool
) -> Backbone | None:
    """Build an eager float32 backbone with the current weights of `source`.

    Gathering sharded weights is a collective: call it on every rank. No random numbers are sampled.

    Args:
        source: the training backbone, which may be compiled or sharded
        meta: a backbone of the same sizes and strategy without storage
        device: device of the copy
        keep: if False, take part in the collectives and return None
    """
    if not keep:
        for value in source.state_dict().values():
            full_tensor(value)
        return None

    copy = meta.to_empty(device=device)
    for new, old in zip(copy.parameters(), source.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    target: dict[str, Tensor] = copy.state_dict()
    for key, value in source.state_dict().items():
        target.pop(key).copy_(full_tensor(value))
    assert not target
    return copy
