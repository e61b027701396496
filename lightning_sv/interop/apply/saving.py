"""Saving a model with computed weights by `save_pretrained` of transformers and other libraries.

Its weights have other keys than those of the plain model. Loading these files into a plain model
would give every scaled weight random numbers, and only list their names. So the files also have an
empty tensor at the name of one computed weight: its shape makes loading fail.
"""

import inspect
from typing import Any

import torch
from torch import nn


class UnfoldedSave:
    """A model's `save_pretrained`, with an empty tensor at the name of a computed weight.

    It replaces the attribute of the model until `remove`.
    """

    def __init__(self, model: Any, weight: str) -> None:
        self._model = model
        self._weight = weight
        self._save = model.save_pretrained
        self._is_own = "save_pretrained" in vars(model)  # not only of the class
        vars(model)["save_pretrained"] = self

    def remove(self) -> None:
        """Restore the attribute."""
        del vars(self._model)["save_pretrained"]
        if self._is_own:
            vars(self._model)["save_pretrained"] = self._save

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model's state dict, to which a hook adds the tensor, or that of the caller."""

        def add(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state[prefix + self._weight] = torch.zeros(0)

        signature = inspect.signature(self._save)
        call = signature.bind_partial(*args, **kwargs)
        if "save_original_format" in signature.parameters:
            # Otherwise transformers renames and splits weights, such as those of experts. Only
            # from_pretrained reverts that, but load_state_dict reads this file.
            call.arguments["save_original_format"] = False
        state = call.arguments.get("state_dict")
        if state is not None:
            call.arguments["state_dict"] = {**state, self._weight: torch.zeros(0)}

        handle = self._model.register_state_dict_post_hook(add)
        try:
            return self._save(*call.args, **call.kwargs)
        finally:
            handle.remove()


def load_unfolded(
    name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Remove the tensor of `UnfoldedSave` from a state dict, before it is loaded."""
    saved = state.get(prefix + name)
    if saved is not None and not saved.numel():
        del state[prefix + name]
