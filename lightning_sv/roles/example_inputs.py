"""Example inputs of the traced call: given, or token ids, an image or speech made from a configuration."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import UninitializedParameter

from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import Backbone
from lightning_sv.roles.trace import run_method

TOKENS = 16
#: limits of a setting used as a size, of the elements of an image, and of its embeddings
_MAX_SIZE, _MAX_NUMBERS, _MAX_EMBEDDINGS = 8192, 2**28, 2**14
#: frames of speech features, and samples of a waveform: a second at 16 kHz
_FRAMES = 64
_SAMPLES = 16_000


def example_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the traced call, from the example or the model's config."""
    check_module(model)
    if any(parameter.is_meta and type(parameter.data) is Tensor for parameter in model.parameters()):
        raise ConfigError("the model is on the meta device, without a trace; build it with fake_model(lambda: ...).")
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        wanted = "a plain tensor. Find roles and apply strategies before you shard or quantize."
        expect(kind is Tensor or is_fake(parameter), name, f"a {kind.__name__}", wanted)
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if example is not None:
        return (example,), {}
    model = uncompiled(model)
    if isinstance(model, Backbone):
        return (token_ids(model.config.vocab_size).to(next(model.parameters()).device),), {}
    kwargs = _from_config(model)
    if kwargs is None:
        hint = "pass example=, the tensor, tuple or dict of keywords of its forward. Commands need a config."
        raise ConfigError(f"{type(model).__name__} has no config that describes its inputs; {hint}")
    return (), kwargs


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which forwards attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def check_module(model: object) -> None:
    """Check that `model` is a module with parameters, not its class or its name."""
    found = model if isinstance(model, str | type) else f"a {type(model).__name__}"
    expect(isinstance(model, nn.Module), "model", found, "an nn.Module, not its class or its name.")
    assert isinstance(model, nn.Module)
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    expect(not scripted, "model", "one with modules of torch.jit.script", "a model in Python.")
    parameters = list(model.parameters())
    lazy = any(isinstance(parameter, UninitializedParameter) for parameter in parameters)
    wanted = "one without lazy modules. Run a forward pass first."
    expect(not lazy, "model", f"{type(model).__name__} with lazy modules", wanted)
    wanted = "a model with parameters. A LightningModule may create them in configure_model(); call it first."
    expect(bool(parameters), "model", f"{type(model).__name__} without parameters", wanted)


def _from_config(model: nn.Module) -> dict[str, Any] | None:
    """Return keyword arguments for a transformers model; None if its configuration is insufficient.

    Raises:
        ConfigError: the model rejects images of its configuration, or needs a different kind of input
    """
    unwrap: Any = getattr(model, "get_base_model", lambda: model)  # the forward of PEFT takes anything
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    accepted = set(inspect.signature(unwrap().forward).parameters)
    like = next(model.parameters())
    inputs = _speech(config, accepted, like)
    token = _image_token(config)
    image, n_embeddings = _accepted_image(model, token, _images(config, accepted, like))
    inputs |= image
    if "input_ids" in accepted:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        placeholders = _placeholders(config, token, n_embeddings)
        inputs["input_ids"] = token_ids(vocabulary, placeholders).to(like.device)
        if "mm_token_type_ids" in accepted and placeholders:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        vocabulary = config.get_text_config(decoder=True).vocab_size
        inputs["decoder_input_ids"] = token_ids(vocabulary).to(like.device)
    _check_main_input(model, accepted, inputs)
    if inputs and hasattr(config.get_text_config(), "use_cache") and ("use_cache" in accepted or "kwargs" in accepted):
        inputs["use_cache"] = False
    return inputs or None


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


def _accepted_image(
    model: nn.Module, token: int | None, images: Iterator[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """Return the first image that the model accepts, and its number of embeddings among the tokens.

    Raises:
        ConfigError: there are images of its configuration, and it accepts none
    """
    first_error: Exception | None = None
    for image in images:
        if any(value.numel() > _MAX_NUMBERS for value in image.values()):
            continue
        if token is None:
            return image, 0
        try:
            n_embeddings = _embeddings(model, image)
        except Exception as error:  # models can raise anything for a wrong layout
            first_error = first_error or error
            continue
        if n_embeddings is not None:
            return image, n_embeddings
    if first_error is not None:
        why = f"{type(first_error).__name__}: {' '.join(str(first_error).split())[:200]}"
        hint = "Correct vision_config, or pass example= to weight_decay_roles."
        raise ConfigError(f"{type(model).__name__} accepts no image of the size in its config ({why}). {hint}")
    return {}, 0


def _speech(config: Any, accepted: set[str], like: Tensor) -> dict[str, Any]:
    """Return the input of a speech model, with the device and dtype of `like`; empty for other models."""
    one = torch.ones((), device=like.device, dtype=like.dtype)  # expanded without memory
    bins = _first(config, "num_mel_bins")
    features = _first(config, "input_feat_per_channel")
    frames = _first(config, "max_source_positions")
    if "input_features" in accepted and bins and frames:
        return {"input_features": one.expand(1, bins, 2 * frames)}  # a convolution of stride 2 follows
    if "input_features" in accepted and features:
        return {"input_features": one.expand(1, _FRAMES, features)}
    if "input_values" in accepted and not bins:
        return {"input_values": one.expand(1, _SAMPLES)}
    return {}


def token_ids(vocabulary: int, inner: list[int] | None = None) -> Tensor:
    """Return (1, 16 + len(inner)) ids; the 16 differ from `inner` and from 0 to 3, often special tokens."""
    ids = [i for i in range(4, 4 + TOKENS + len(set(inner or []))) if i not in (inner or [])][:TOKENS]
    ids = [i % vocabulary for i in ids]
    return torch.tensor([[*ids[: TOKENS // 2], *(inner or []), *ids[TOKENS // 2 :]]])


def _images(config: Any, accepted: set[str], like: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the inputs of an image in different layouts, with the device and dtype of `like`."""
    if "pixel_values" not in accepted:
        return
    one = torch.ones((), device=like.device, dtype=like.dtype)  # expanded without memory; zeros would be padding
    vision = getattr(config, "vision_config", config)
    channels = _first(vision, "num_channels", "in_channels", "in_chans") or 3
    if "image_grid_thw" in accepted:  # patches, each a row
        patch = _first(vision, "patch_size") or 14
        merged = _first(vision, "spatial_merge_size") or 1
        side, deep = 4 * merged, _first(vision, "temporal_patch_size") or 1
        for depth in {deep: None, 1: None}:
            pixels = one.expand(side * side, channels * depth * patch * patch)
            yield {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]], device=like.device)}
        return
    size = _first(vision, "image_size")
    if size is None:
        return
    sizes = {"image_sizes": torch.tensor([[size, size]], device=like.device)}
    for lead in ((1,), (1, 1), (1, 2), (1, 5)):  # one image, or its tiles
        image = {"pixel_values": one.expand(*lead, channels, size, size)}
        yield image
        if "image_sizes" in accepted:
            yield image | sizes


def _embeddings(model: nn.Module, image: dict[str, Any]) -> int | None:
    """Return the number of embeddings of an image; None if the result is not understood."""
    embed: Any = getattr(model, "get_image_features", None)
    if embed is None:
        return 0
    names = inspect.signature(embed).parameters
    accepted = {key: value for key, value in image.items() if key in names or "args" in names}
    out = run_method(model, embed, accepted)
    rows = getattr(out, "pooler_output", out)
    parts: list[Any] = list(rows) if isinstance(rows, (list, tuple)) else [rows]
    if not all(isinstance(part, Tensor) and part.ndim > 1 for part in parts):
        return None
    count = sum(part.shape[:-1].numel() for part in parts)
    return count if count <= _MAX_EMBEDDINGS else None


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        if isinstance(value, int) and 0 < value <= _MAX_SIZE:
            return value
    return None
