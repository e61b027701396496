"""Saving a model with computed weights by transformers' `save_pretrained`.

Its weights have other keys than those of the plain model. Loading these files into a plain model
would give every scaled weight random numbers, and only list their names. So the files also have an
empty tensor at the name of one computed weight: its shape makes loading fail.
"""

import inspect
from typing import Any

import torch
from torch import nn


def save_unfolded(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call `save_pretrained` with an empty tensor at the name of a computed weight.

    transformers saves the model's state dict, to which a hook adds the tensor, or one that the
    caller passes.
    """

    def add(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + name] = torch.zeros(0)

    save = type(model).save_pretrained
    positional = inspect.signature(save).bind_partial(model, *args)
    for arguments in (positional.arguments, kwargs):  # it may be passed in either way
        if arguments.get("state_dict") is not None:
            arguments["state_dict"] = {**arguments["state_dict"], name: torch.zeros(0)}
    handle = model.register_state_dict_post_hook(add)
    try:
        return save(*positional.args, **kwargs)
    finally:
        handle.remove()


def load_unfolded(
    name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Remove the tensor of `save_unfolded` from a state dict, before it is loaded."""
    saved = state.get(prefix + name)
    if saved is not None and not saved.numel():
        del state[prefix + name]
