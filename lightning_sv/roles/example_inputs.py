"""Example inputs of the traced call: given, or token ids.

A transformers model shows in the arguments of its forward whether it reads token ids, and in its
configuration their number. Roles do not depend on the values.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy

from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import Backbone

#: length of the example
_TOKENS = 16


class MissingExampleError(ConfigError):
    """Report that the model needs an example, or one that reaches more of its parameters."""


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call, from the example or the model's config.

    Raises:
        ConfigError: the model cannot be traced
        MissingExampleError: nothing describes its inputs
    """
    check_module(model)
    _check_tensors(model)
    if example is not None:
        return _given(example)

    model = uncompiled(model)
    if isinstance(model, Backbone):
        ids = token_ids(model.config.vocab_size)
        return (ids.to(next(model.parameters()).device),), {}

    kwargs = _from_config(model)
    if not kwargs:
        what = f"{type(model).__name__} has no config that describes its inputs"
        hint = "pass example=, the tensor, tuple or dict of keywords of its forward."
        raise MissingExampleError(f"{what}; {hint}")
    return (), kwargs


def _given(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    return (example,), {}


def _check_tensors(model: nn.Module) -> None:
    """Check that all parameters are plain or fake tensors."""
    expected = "a plain tensor. Find roles and apply strategies before you shard or quantize."
    for name, parameter in model.named_parameters():
        if is_fake(parameter):
            continue
        kind = type(parameter.data)
        expect(kind is Tensor, name, f"a {kind.__name__}", expected)
        if parameter.is_meta:
            hint = "build it with fake_model(lambda: ...)."
            raise ConfigError(f"the model is on the meta device, without a trace; {hint}")


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which forwards attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def check_module(model: object) -> None:
    """Check that `model` is a module with parameters, not its class or its name.

    Raises:
        ConfigError: it is not, its parameters have no shapes yet, or there are none
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        found = model if isinstance(model, str | type) else f"a {name}"
        raise ConfigError(f"model is {found}; expected an nn.Module, not its class or its name.")

    parameters = list(model.parameters())
    if any(map(is_lazy, parameters)):
        expected = "one without lazy modules. Run a forward pass first."
        raise ConfigError(f"model is {name} with lazy modules; expected {expected}")
    if not parameters:
        hint = "A LightningModule may create them in configure_model(); call it first."
        expected = f"a model with parameters. {hint}"
        raise ConfigError(f"model is {name} without parameters; expected {expected}")


def _from_config(model: nn.Module) -> dict[str, Any]:
    """Return token ids for a transformers model; empty if its config has no vocabulary.

    Raises:
        MissingExampleError: the model needs an input that is not token ids
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return {}

    accepted = _accepted_names(model)
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {}
    for name, text in _texts(config).items():
        vocabulary = getattr(text, "vocab_size", None)
        if name in accepted and isinstance(vocabulary, int):
            inputs[name] = token_ids(vocabulary).to(device)
    _check_main_input(model, accepted, inputs)

    if inputs and _takes_cache(config, accepted):
        inputs["use_cache"] = False
    return inputs


def _texts(config: Any) -> dict[str, Any]:
    """Return name of an argument of token ids -> configuration of the text."""
    texts = {"input_ids": config.get_text_config()}
    if getattr(config, "is_encoder_decoder", False):
        texts["decoder_input_ids"] = config.get_text_config(decoder=True)
    return texts


def _takes_cache(config: Any, accepted: set[str]) -> bool:
    has_option = hasattr(config.get_text_config(), "use_cache")
    return has_option and not accepted.isdisjoint({"use_cache", "kwargs"})


def _accepted_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    inner: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's forward takes anything
        inner = inner.get_base_model()
    return set(inspect.signature(inner.forward).parameters)


def _check_main_input(model: nn.Module, accepted: set[str], inputs: dict[str, Any]) -> None:
    """Check that the input that transformers names first is among those made."""
    name = getattr(model, "main_input_name", None)
    if name in accepted and name not in inputs:
        why = "which cannot be made from its config; expected token ids"
        raise MissingExampleError(f"{type(model).__name__} needs {name}, {why}. Pass example=.")


def token_ids(vocabulary: int) -> Tensor:
    """Return (1, 16) ids, different from 0 to 3, which are often special tokens."""
    return torch.arange(4, 4 + _TOKENS)[None] % vocabulary
