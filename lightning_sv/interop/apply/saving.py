"""Saving a model with computed weights by transformers' `save_pretrained`.

Its weights have other keys than those of the plain model. Loading these files into a plain model
would give every scaled weight random numbers, and only list their names. So the files also have an
empty tensor at the name of one computed weight: its shape makes loading fail.
"""

from typing import Any

import torch
from torch import nn


def save_unfolded(
    model: Any, name: str, *args: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Call `save_pretrained` with an empty tensor at the name of a computed weight."""
    state = model.state_dict() if state_dict is None else state_dict
    marked = {**state, name: torch.zeros(0)}
    return type(model).save_pretrained(model, *args, state_dict=marked, **kwargs)


def load_unfolded(
    name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Remove the tensor of `save_unfolded` from a state dict, before it is loaded."""
    saved = state.get(prefix + name)
    if saved is not None and not saved.numel():
        del state[prefix + name]
