"""Example inputs of the traced call: given, or made from a configuration.

These are token ids, an image or speech.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import UninitializedParameter

from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import Backbone
from lightning_sv.roles.trace import run_method

TOKENS = 16
#: frames of speech features
_FRAMES = 64
#: samples of a waveform: a second at 16 kHz
_SAMPLES = 16_000
#: limit of a setting used as a size
_MAX_SIZE = 8192


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call, from the example or the model's config.

    Raises:
        ConfigError: the model cannot be traced, or nothing describes its inputs
    """
    check_module(model)
    _check_tensors(model)
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if example is not None:
        return (example,), {}
    model = uncompiled(model)
    if isinstance(model, Backbone):
        ids = token_ids(model.config.vocab_size)
        return (ids.to(next(model.parameters()).device),), {}
    kwargs = _from_config(model)
    if kwargs is None:
        what = f"{type(model).__name__} has no config that describes its inputs"
        hint = "pass example=, the tensor, tuple or dict of keywords of its forward."
        raise ConfigError(f"{what}; {hint} Commands need a config.")
    return (), kwargs


def _check_tensors(model: nn.Module) -> None:
    """Check that all parameters are plain or fake tensors."""
    kinds = {name: type(parameter.data) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.is_meta and kinds[name] is Tensor:
            hint = "build it with fake_model(lambda: ...)."
            raise ConfigError(f"the model is on the meta device, without a trace; {hint}")
    for name, parameter in model.named_parameters():
        wanted = "a plain tensor. Find roles and apply strategies before you shard or quantize."
        is_usable = kinds[name] is Tensor or is_fake(parameter)
        expect(is_usable, name, f"a {kinds[name].__name__}", wanted)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which forwards attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def check_module(model: object) -> None:
    """Check that `model` is a module with parameters, not its class or its name.

    Raises:
        ConfigError: it is not, or its modules are lazy, or scripted
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        found = model if isinstance(model, str | type) else f"a {name}"
        wanted = "an nn.Module, not its class or its name."
        raise ConfigError(f"model is {found}; expected {wanted}")
    for module in model.modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        found = "one with modules of torch.jit.script"
        expect(not is_scripted, "model", found, "a model in Python.")
    parameters = list(model.parameters())
    for parameter in parameters:
        is_lazy = isinstance(parameter, UninitializedParameter)
        wanted = "one without lazy modules. Run a forward pass first."
        expect(not is_lazy, "model", f"{name} with lazy modules", wanted)
    if not parameters:
        hint = "A LightningModule may create them in configure_model(); call it first."
        wanted = f"a model with parameters. {hint}"
        raise ConfigError(f"model is {name} without parameters; expected {wanted}")


def _from_config(model: nn.Module) -> dict[str, Any] | None:
    """Return keyword arguments for a transformers model; None if its configuration is insufficient.

    Raises:
        ConfigError: the model rejects images of its configuration, or needs a different kind of
            input
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    accepted = _accepted_names(model)
    like = next(model.parameters())
    token = _image_token(config)
    image = _image(config, accepted, like)
    n_embeddings = 0 if token is None else _checked_embeddings(model, image)
    inputs = image | _speech(config, accepted, like)
    if "input_ids" in accepted:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        placeholders = _placeholders(config, token, n_embeddings)
        ids = token_ids(vocabulary, placeholders).to(like.device)
        inputs = inputs | {"input_ids": ids}
        if token is not None and n_embeddings and "mm_token_type_ids" in accepted:
            inputs["mm_token_type_ids"] = ids.eq(token).long()
    _check_main_input(model, accepted, inputs)
    return _with_decoder(config, accepted, inputs, like) or None


def _accepted_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    unwrap: Any = getattr(model, "get_base_model", None)  # PEFT's forward takes anything
    inner: Any = model if unwrap is None else unwrap()
    return set(inspect.signature(inner.forward).parameters)


def _with_decoder(
    config: Any, accepted: set[str], inputs: dict[str, Any], like: Tensor
) -> dict[str, Any]:
    """Return inputs with the tokens of a decoder, and without a cache."""
    added: dict[str, Any] = {}
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        vocabulary = config.get_text_config(decoder=True).vocab_size
        added["decoder_input_ids"] = token_ids(vocabulary).to(like.device)
    if inputs and _has_cache(config, accepted):
        added["use_cache"] = False
    return inputs | added


def _has_cache(config: Any, accepted: set[str]) -> bool:
    takes_option = not accepted.isdisjoint({"use_cache", "kwargs"})
    return takes_option and hasattr(config.get_text_config(), "use_cache")


def _check_main_input(model: nn.Module, accepted: set[str], inputs: dict[str, Any]) -> None:
    """Check that the input that transformers names first is among those made."""
    name = getattr(model, "main_input_name", None)
    if name in accepted and name not in inputs:
        why = "which cannot be made from its config; expected token ids, an image or speech"
        hint = "Pass example= to weight_decay_roles; commands have none."
        raise ConfigError(f"{type(model).__name__} needs {name}, {why}. {hint}")


def _image_token(config: Any) -> int | None:
    """Return the token that stands for an embedding of an image."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def _placeholders(config: Any, token: int | None, n_embeddings: int) -> list[int]:
    """Return the token ids of an image, one per embedding."""
    if token is None or not n_embeddings:
        return []
    tokens = [token] * n_embeddings
    before = getattr(config, "vision_start_token_id", None)
    if isinstance(before, int):
        tokens.insert(0, before)
    return tokens


def _checked_embeddings(model: nn.Module, image: dict[str, Any]) -> int:
    """Return the number of embeddings of an image; 0 without one.

    Raises:
        ConfigError: the model rejects it
    """
    if not image:
        return 0
    try:
        return _embeddings(model, image)
    except Exception as error:  # models can raise anything for a wrong layout
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        what = f"{type(model).__name__} accepts no image of the size in its config ({why})"
        hint = "Correct vision_config, or pass example= to weight_decay_roles."
        raise ConfigError(f"{what}. {hint}") from error


def _one(like: Tensor) -> Tensor:
    """Return a 1 to expand without memory; zeros would be padding."""
    return torch.ones((), device=like.device, dtype=like.dtype)


def _speech(config: Any, accepted: set[str], like: Tensor) -> dict[str, Any]:
    """Return the input of a speech model, with the device and dtype of `like`."""
    one = _one(like)
    bins = _first(config, "num_mel_bins")
    frames = _first(config, "max_source_positions")
    features = _first(config, "input_feat_per_channel")
    if "input_features" in accepted and bins and frames:
        # (batch, bins, frames), and a convolution of stride 2 follows
        return {"input_features": one.expand(1, bins, 2 * frames)}
    if "input_features" in accepted and features:
        return {"input_features": one.expand(1, _FRAMES, features)}
    if "input_values" in accepted and not bins:
        return {"input_values": one.expand(1, _SAMPLES)}
    return {}


def token_ids(vocabulary: int, inner: Sequence[int] = ()) -> Tensor:
    """Return (1, 16 + len(inner)) ids, with `inner` in the middle.

    The 16 differ from `inner` and from 0 to 3, often special tokens.
    """
    candidates = (i for i in count(4) if i not in inner)
    ids = [i % vocabulary for i in islice(candidates, TOKENS)]
    half = TOKENS // 2
    return torch.tensor([[*ids[:half], *inner, *ids[half:]]])


def _image(config: Any, accepted: set[str], like: Tensor) -> dict[str, Any]:
    """Return the inputs of an image, with the device and dtype of `like`."""
    vision = getattr(config, "vision_config", config)
    size = _first(vision, "image_size")
    if "pixel_values" not in accepted:
        return {}
    if "image_grid_thw" in accepted:
        return _patches(vision, like)
    return (
        {}
        if size is None
        else {"pixel_values": _one(like).expand(1, _channels(vision), size, size)}
    )


def _patches(vision: Any, like: Tensor) -> dict[str, Any]:
    """Return an image as patches, each a row."""
    patch = _first(vision, "patch_size") or 14
    side = 4 * (_first(vision, "spatial_merge_size") or 1)
    frames = _first(vision, "temporal_patch_size") or 1
    numbers = _channels(vision) * frames * patch * patch
    return {
        "pixel_values": _one(like).expand(side * side, numbers),
        "image_grid_thw": torch.tensor([[1, side, side]], device=like.device),
    }


def _channels(vision: Any) -> int:
    return _first(vision, "num_channels", "in_channels", "in_chans") or 3


def _embeddings(model: nn.Module, image: dict[str, Any]) -> int:
    """Return the number of embeddings of an image."""
    embed: Any = getattr(model, "get_image_features", None)
    if embed is None:
        return 0
    out = run_method(model, embed, image)
    rows = getattr(out, "pooler_output", out)
    parts: list[Tensor] = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    return sum(part.shape[:-1].numel() for part in parts)


def _first(config: Any, *names: str) -> int | None:
    """Return the first of some settings that is a size."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and 0 < value <= _MAX_SIZE:
            return value
    return None
